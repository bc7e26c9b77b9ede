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
from triptych import __version__
from triptych.apps.cli.app import app

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
#: Programs of the machines that the jobs run on, and of the shell.
PROGRAMS = {"base64", "cp", "curl", "docker", "echo", "grep", "helm", "kind", "kubectl", "python", "sed"}
PROGRAMS |= {"tee", "auditwheel", "python3", "/opt/python/cp311-cp311/bin/python", ".venv/bin/python"}
#: Modules that `python -m` runs there.
MODULES = {"pip", "pytest"}
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
            if program.endswith(("python", "python3")):
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
        assert any(ROOT.glob(name)), name


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


#: Programs that a dry run only notes: what they do is tried elsewhere, or needs a registry.
NOTED = ("make", "docker", "helm", "auditwheel", "python3", "cp")
#: What `docker inspect` prints of a pushed image.
DIGEST = "sha256:0123"
EXPRESSION = re.compile(r"\$\{\{ *([\w.]+) *\}\}")


def dry_run(job: str, folder: Path, tag: str, values: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The commands of `NOTED` that a job of the release runs, and what its steps put out.

    The scripts themselves run, in `folder`, which has the files that they read and write; `values` are those
    of expressions. CalledProcessError where a script fails.
    """
    programs, notes, variables, outputs = (folder / name for name in (".bin", ".notes", ".env", ".outputs"))
    programs.mkdir(exist_ok=True)
    for name in NOTED:
        answer = f"echo ghcr.io/x@{DIGEST}" if name == "docker" else ":"
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {notes}\n{answer}\n')
        (programs / name).chmod(0o755)
    for file in (notes, variables, outputs):
        file.write_text("")
    for step in load(FOLDER / "release.yml")["jobs"][job]["steps"]:
        written = [line.partition("=") for line in outputs.read_text().splitlines()]
        known = values | {f"steps.push.outputs.{key}": value for key, _, value in written}
        for text in (*step.get("with", {}).values(), step.get("run", "")):
            for name in EXPRESSION.findall(str(text)):
                assert name in known or name.startswith("github."), f"{job}: nothing sets {name}"
        script = EXPRESSION.sub(lambda found, known=known: known[found[1]], step.get("run", ""))
        environment = dict(line.split("=", 1) for line in variables.read_text().splitlines())
        environment |= {"GITHUB_ENV": str(variables), "GITHUB_OUTPUT": str(outputs), "GITHUB_REF_NAME": tag}
        environment |= {
            "GITHUB_REPOSITORY": "Some-Owner/Triptych",
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        script = script.replace("/opt/python/cp311-cp311/bin/python", "python3")
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment, check=True, timeout=30
        )
    return notes.read_text().splitlines(), dict(
        line.split("=", 1) for line in outputs.read_text().splitlines()
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that scripts of the release read or change."""
    for name in ("triptych/__init__.py", "triptych_bench/pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "deploy" / "helm", tmp_path / "deploy" / "helm")
    return tmp_path


def test_a_tag_of_the_version_is_released_and_another_one_is_not(checkout: Path) -> None:
    dry_run("version", checkout, f"v{__version__}", {})
    with pytest.raises(subprocess.CalledProcessError):
        dry_run("version", checkout, "v99.0.0", {})


def test_a_dry_run_builds_and_pushes_images_and_chart_of_the_version(checkout: Path) -> None:
    tag = f"v{__version__}"
    commands_of_wheels, _ = dry_run("wheel", checkout, tag, {})
    assert "python3 deploy/distributions.py built wheels" in commands_of_wheels
    name = "ghcr.io/some-owner/triptych/triptych-proxy"
    notes, outputs = dry_run("images", checkout, tag, {"matrix.image": "proxy"})
    assert notes[0] == "make images IMAGES=proxy PYTHON=python3"
    assert notes[1] == f"docker push {name}:{__version__}"
    assert outputs == {"name": name, "digest": DIGEST}
    notes, _ = dry_run("chart", checkout, tag, {})
    assert notes == [
        "python3 deploy/distributions.py dist chart",
        f"helm push dist/triptych-{__version__}.tgz oci://ghcr.io/some-owner/triptych/charts",
    ]


def test_jobs_wait_for_jobs_that_are_there_and_a_step_that_is_read_has_its_id() -> None:
    for path in WORKFLOWS:
        jobs = load(path)["jobs"]
        for name, job in jobs.items():
            needs = job.get("needs", [])
            assert set([needs] if isinstance(needs, str) else needs) <= set(jobs), (path.name, name)
            ids = {step["id"] for step in job["steps"] if "id" in step}
            read = re.findall(r"steps\.([\w-]+)\.", str(job))
            assert set(read) <= ids, (path.name, name)


def test_no_step_of_a_workflow_leaves_the_token_of_the_checkout_behind() -> None:
    for path in WORKFLOWS:
        for step in steps(path):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] == "false", path.name


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
