"""The workflows of .github: nothing has run them, so what they name is checked here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kubernetes.chart import render
from support.kubernetes.combinations import merged
from triptych.apps.cli.app import app

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
#: Programs of the machines that the jobs run on, and of the shell.
PROGRAMS = {"base64", "cp", "curl", "docker", "echo", "grep", "helm", "kind", "kubectl", "python", "sed"}
PROGRAMS |= {"tee", "auditwheel", "/opt/python/cp311-cp311/bin/python", ".venv/bin/python"}
#: Modules that `python -m` runs there.
MODULES = {"pip", "build", "pytest"}
ASSIGNED = re.compile(r"^[A-Za-z_]+=")


def load(path: Path) -> dict[str, Any]:
    """The workflow; every value is a text, for YAML 1.1 reads `on` as true."""
    loaded: dict[str, Any] = yaml.BaseLoader(path.read_text(encoding="utf-8")).get_single_data()
    return loaded


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in load(path)["jobs"].values():
        yield from job["steps"]


def commands(path: Path) -> Iterator[list[str]]:
    """Every command of every script as its words, those in $(…) and behind a pipe too."""
    for step in steps(path):
        script = step.get("run", "").replace("\\\n", " ")
        script = re.sub(r"\$\{\{.*?\}\}", "EXPRESSION", script)
        inner = re.findall(r"\$\(([^()]*(?:\\\([^()]*\\\)[^()]*)?)\)", script)
        for line in [*re.sub(r"\$\([^\n]*\)", "OUTPUT", script).splitlines(), *inner]:
            for part in re.split(r" \| | && ", line):
                words = shlex.split(part)
                while words and ASSIGNED.match(words[0]):
                    del words[0]
                if words:
                    yield words


ALL = [pytest.param(path, id=path.stem) for path in WORKFLOWS]


@pytest.mark.parametrize("path", ALL)
def test_every_command_and_target_that_a_workflow_names_is_there(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", makefile, re.M)
    for words in commands(path):
        program, arguments = words[0], words[1:]
        if program == "make":
            named = [word for word in arguments if "=" not in word]
            variables = [word.partition("=")[0] for word in arguments if "=" in word]
            assert named and set(named) <= set(targets), words
            assert all(re.search(rf"^{name} +\?=", makefile, re.M) for name in variables), words
        elif program == "triptych":
            options = [name for one in app.commands[arguments[0]].params for name in one.opts]
            assert {word for word in arguments if word.startswith("--")} <= set(options), words
        else:
            assert program in PROGRAMS, words
            if program.endswith("python"):
                module = arguments[0] == "-m" and arguments[1] in MODULES
                assert module or (ROOT / arguments[0]).is_file(), words


@pytest.mark.parametrize("path", ALL)
def test_every_path_that_a_workflow_names_is_there(path: Path) -> None:
    ours = {entry.name for entry in ROOT.iterdir()} - {".venv", "dist", "build"}
    paths = [word for words in commands(path) for word in words if word.partition("/")[0] in ours]
    paths += [
        step["with"]["cache-dependency-path"] for step in steps(path) if "cache" in step.get("with", {})
    ]
    assert paths
    for name in paths:
        assert (ROOT / name).exists(), name


def test_the_chart_of_the_kind_job_has_the_objects_that_it_asks_for() -> None:
    [install] = [words for words in commands(FOLDER / "kind.yml") if words[:3] == ["helm", "install", "demo"]]
    values: dict[str, Any] = {}
    for flag, name in zip(install, install[1:], strict=False):
        if flag == "--values":
            values = merged(values, yaml.safe_load((ROOT / name).read_text()))
    manifests = render(values, name="demo", namespace="triptych")
    made = {(one["kind"].lower(), one["metadata"]["name"]) for one in manifests}
    asked = [words for words in commands(FOLDER / "kind.yml") if words[0] == "kubectl"]
    services = [word.partition("/")[2] for words in asked for word in words if word.startswith("service/")]
    secrets = [words[words.index("secret") + 1] for words in asked if "secret" in words]
    assert services and secrets
    assert {*(("service", name) for name in services), *(("secret", name) for name in secrets)} <= made
    assert "scaledobject" in {kind for kind, _ in made}
    [key] = [one for one in manifests if one["metadata"]["name"] == secrets[0]]
    assert "key" in {**key.get("data", {}), **key.get("stringData", {})}


def release_step(job: str, name: str) -> str:
    """The script of a step of the release workflow."""
    [step] = [
        one for one in load(FOLDER / "release.yml")["jobs"][job]["steps"] if one.get("name", "") == name
    ]
    return str(step["run"])


def test_a_release_builds_every_image_and_names_it_without_capitals(tmp_path: Path) -> None:
    images = load(FOLDER / "release.yml")["jobs"]["images"]
    built = {one["image"] for one in images["strategy"]["matrix"]["include"]}
    assert built == {file.stem for file in (ROOT / "deploy" / "docker").glob("*.Dockerfile")}
    script = release_step("images", "the prefix of images, which has no capitals")
    environment = {"GITHUB_REPOSITORY": "Some-Owner/Triptych", "GITHUB_ENV": str(tmp_path / "env")}
    subprocess.run(["bash", "-eu", "-c", script], env=environment, check=True, timeout=20)
    assert (tmp_path / "env").read_text() == "IMAGE_PREFIX=ghcr.io/some-owner/triptych/triptych-\n"


def test_a_released_chart_and_its_examples_name_the_registry_that_the_images_are_pushed_to(tmp_path):
    chart = tmp_path / "deploy" / "helm" / "triptych"
    shutil.copytree(ROOT / "deploy" / "helm" / "triptych", chart)
    script = release_step("chart", "the chart and its examples name this release's images")
    environment = {"GITHUB_REPOSITORY": "Some-Owner/Triptych", "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-eu", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=20)
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for file in (None, *sorted((chart / "examples").glob("*.yaml"))):
        given = yaml.safe_load(file.read_text()) if file is not None else {}
        if given.get("image", {}).get("registry"):
            continue  # A mirror of one's own.
        text = yaml.safe_dump(render(merged(values, given)))
        ours = {word for word in re.findall(r"image: (\S+)", text) if "triptych" in word}
        assert ours
        assert all(word.startswith("ghcr.io/some-owner/triptych/triptych-") for word in ours), (file, ours)
    assert "docker.io/valkey/valkey:" in yaml.safe_dump(render(values))
