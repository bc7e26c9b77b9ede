"""The Kubernetes quick start installs what it says, and asks what is there."""

from __future__ import annotations

import re

import yaml

from support.kubernetes.chart import ROOT, notes, render
from triptych import __version__

PAGE = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8").partition("\n## One machine")[0]
VALUES = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
MANIFESTS = render(VALUES, name="mine", namespace="triptych")


def test_the_values_give_two_encoders_and_a_pd_worker_that_serve_the_checkpoint_on_the_claim() -> None:
    deployments = {one["metadata"]["name"]: one["spec"] for one in MANIFESTS if one["kind"] == "Deployment"}
    assert {name: spec["replicas"] for name, spec in deployments.items()} == {
        "mine-proxy": 2,
        "mine-encoder-default": 2,
        "mine-pd-default": 1,
    }
    for name, command in (("mine-encoder-default", "encoder"), ("mine-pd-default", "pd")):
        pod = deployments[name]["template"]["spec"]
        assert pod["containers"][0]["args"][:2] == [command, "/model/qwen3-vl"]
        assert "qwen" in pod["containers"][0]["args"]
        claims = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert [claim["claimName"] for claim in claims] == ["models"]


def test_the_images_that_are_pushed_are_those_that_the_pods_pull() -> None:
    (prefix,) = re.findall(r"IMAGE_PREFIX=(\S+)", PAGE)
    names, pushed = re.findall(r"for name in (.*?); do docker push (\S+)\$name:", PAGE)[0]
    assert pushed == prefix and f"$name:{__version__};" in PAGE
    others = re.findall(r"docker push (\S+[^;\s])$", PAGE, re.MULTILINE)
    for image in others:
        name = image.removeprefix(VALUES["image"]["registry"] + "/")
        assert f"docker pull {name}\n" in PAGE and f"docker tag {name} {image}\n" in PAGE
    pods = [one["spec"]["template"]["spec"] for one in MANIFESTS if "template" in one.get("spec", {})]
    pulled = {part["image"] for one in pods for part in [*one.get("initContainers", []), *one["containers"]]}
    assert pulled == {*others, *(f"{prefix}{name}:{__version__}" for name in names.split())}


def test_its_commands_are_those_of_the_charts_notes() -> None:
    said = [line.strip() for line in notes(VALUES, name="mine", namespace="triptych").splitlines()]
    for command in (line for line in said if line.startswith(("KEY=", "kubectl --namespace triptych port"))):
        assert command in PAGE, command
