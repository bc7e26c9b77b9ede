"""`make images`: which builder it takes, what it passes on, and what it says when something is missing."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from deploy.docker.host_pip import local_paths, settings
from deploy.docker.requirements import requirements
from triptych import __version__

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "deploy" / "docker"
#: What the scripts run beside builders.
PROGRAMS = ("sh", "dirname", "sed", "git", "mktemp", "rm", "cat", "du", "cut")


class Machine:
    """A machine with few programs; builders on it note what they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._bin, self._notes = folder / "bin", folder / "notes"
        self._bin.mkdir()
        for name in PROGRAMS:
            found = shutil.which(name)
            assert found, name
            (self._bin / name).symlink_to(found)

    def add(self, name: str, answer: str = "exit 0") -> None:
        """Installs a program: it notes its words, then does `answer`."""
        program = self._bin / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {self._notes}\n{answer}\n')
        program.chmod(0o755)

    def run(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self._bin), "HOME": str(self._bin.parent), "TMPDIR": str(self._bin.parent)}
        return subprocess.run(
            ["sh", FOLDER / script, *words],
            env=environment | variables, capture_output=True, text=True, timeout=30,
        )  # fmt: skip

    def asked(self, start: str) -> list[str]:
        """What builders were asked that begins so."""
        return [line for line in self._notes.read_text().splitlines() if line.startswith(start)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_builder_it_says_so_with_the_remedy(machine):
    done = machine.run("build.sh")
    assert done.returncode == 2
    assert "docker is not installed" in done.stderr and "buildah is not installed" in done.stderr
    assert "apt-get install buildah crun" in done.stderr


def test_buildah_s_policy_is_a_file_that_is_gone_afterwards_and_the_only_one(machine, tmp_path):
    """Where the machine has a policy of its own, none is made."""
    before = sorted(path.name for path in FOLDER.iterdir())
    machine.add("buildah", 'for word in "$@"; do case $word in */tmp.*) cat $word ;; esac; done')
    done = machine.run("build.sh", "proxy")
    assert done.returncode == 0, done.stderr
    asked = machine.asked("buildah bud")[0].split()
    if "--signature-policy" in asked:
        policy = Path(asked[asked.index("--signature-policy") + 1])
        assert policy.parent == tmp_path and "insecureAcceptAnything" in done.stdout
        assert not policy.exists()
    assert sorted(path.name for path in FOLDER.iterdir()) == before


def test_arguments_reach_the_builder_and_torch_s_only_those_that_have_it(machine):
    machine.add("docker")
    words = "--build-arg PIP_INDEX_URL=https://mirror.example/simple"
    done = machine.run(
        "build.sh",
        IMAGE_BUILD_ARGS=words,
        IMAGE_BASE="registry.example/python@sha256:1",
        PIP_TORCH_ARGS="--index-url https://wheels.example",
        IMAGE_PREFIX="registry.example/team/triptych-",
        IMAGE_TAG="7",
    )
    assert done.returncode == 0, done.stderr
    proxy, worker = machine.asked("docker build")
    for asked, name in ((proxy, "proxy"), (worker, "worker-cpu")):
        assert f"-f deploy/docker/{name}.Dockerfile -t registry.example/team/triptych-{name}:7 " in asked
        assert "--build-arg BASE=registry.example/python@sha256:1 " in asked
        assert f"--build-arg VERSION={__version__} " in asked
        assert asked.endswith(f" {words} .")
    assert "--build-arg PIP_TORCH_ARGS=--index-url https://wheels.example" in worker
    assert "PIP_TORCH_ARGS" not in proxy


LISTING = r"""
:env:.cert='/certs/ours.crt'
:env:.default-timeout='180'
:env:.disable-pip-version-check='1'
global.cert='/certs/theirs.crt'
global.extra-index-url='file:///mirror/simple https://mirror.example/simple'
global.find-links='/wheels\nfile:///more%20wheels'
install.user='true'
"""


def test_only_what_says_where_packages_come_from_is_taken_and_a_variable_wins():
    found = settings(LISTING)
    assert found == {
        "cert": "/certs/ours.crt",
        "timeout": "180",
        "extra-index-url": "file:///mirror/simple https://mirror.example/simple",
        "find-links": "/wheels\nfile:///more%20wheels",
    }
    assert settings("\n".join(reversed(LISTING.splitlines())))["cert"] == "/certs/ours.crt"


def test_every_local_folder_is_mounted_and_an_index_with_the_files_beside_it():
    expected = {"/certs/ours.crt", "/mirror", "/wheels", "/more wheels"}
    assert set(local_paths(settings(LISTING))) == {Path(path) for path in expected}


def test_the_proxy_needs_no_extra_and_a_worker_its_own():
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert requirements(text, []) == project["dependencies"]
    assert requirements(text, ["worker"]) == [
        *project["dependencies"],
        *project["optional-dependencies"]["worker"],
    ]
