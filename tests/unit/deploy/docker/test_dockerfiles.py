"""Dockerfiles against the code: what they name exists; they bring nothing of the building machine along."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from support.dockerfiles import NAMES, Dockerfile, read
from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig
from triptych.base.config.flags import flags_of

ROOT = Path(__file__).parents[4]
WORKERS = ("worker-cpu", "worker-cuda")


@pytest.fixture(params=NAMES)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return read(request.param)


def included() -> list[str]:
    """What .dockerignore lets into the build's context."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"  # nothing that is not named
    return [line[1:] for line in lines if line.startswith("!")]


def test_the_image_runs_as_a_user_that_kubernetes_can_tell_from_root(dockerfile):
    assert dockerfile.final.all("USER") == ["65532:65532"]
    words = [word for word, _ in dockerfile.final.instructions]
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])
    assert dockerfile.final.variables()["HOME"] == dockerfile.final.only("WORKDIR") == "/tmp"


def test_every_variable_of_ours_in_an_image_is_one_of_the_services(dockerfile):
    configs = [ProxyConfig] if dockerfile.name == "proxy" else [EncoderConfig, PDConfig]
    ours = {name for name in dockerfile.final.variables() if name.startswith("TRIPTYCH_")}
    assert ours == {"TRIPTYCH_METRICS_PORT"}
    for config in configs:
        assert ours <= {flag.variable for flag in flags_of(config)}


def test_the_ports_are_those_that_the_services_listen_on(dockerfile):
    ports = dockerfile.final.only("EXPOSE").split()
    metrics = dockerfile.final.variables()["TRIPTYCH_METRICS_PORT"]
    if dockerfile.name == "proxy":
        config = ProxyConfig()
        assert ports == [str(config.port), str(config.grpc_port), metrics]
    else:
        assert ports == ["50051", metrics]  # as --advertise $(POD_IP):50051 has it


def test_every_package_is_pinned_and_no_cache_is_left(dockerfile):
    installs = re.findall(
        r"(?<!apt-get )install .*?(?=&&|$)", " \n".join(dockerfile.stages[0].all("RUN")), re.MULTILINE
    )
    assert len(installs) == (3 if dockerfile.name in WORKERS else 2)
    for install in installs:
        assert "-c constraints.txt" in install or "--no-deps ." in install
        assert "--no-cache-dir" in install
        assert "--no-compile" in install  # its bytecode would be stale in an image
    assert "==" not in dockerfile.text  # versions stand in constraints.txt alone


@pytest.mark.parametrize("name", WORKERS)
def test_the_compiler_makes_the_kernels_and_stays_out_of_the_image(name):
    build, final = read(name).stages
    compiler, package = (rest for rest in build.all("RUN") if "g++" in rest or "--no-deps ." in rest)
    assert "install -y --no-install-recommends g++ " in compiler
    assert "&& ls /opt/triptych/lib/python3*/site-packages/triptych/kernels/*.so" in package
    assert not [rest for rest in final.all("RUN") if "g++" in rest]
    assert set(final.all("COPY")) == {
        "--from=build /etc/passwd /etc/group /etc/",
        "--from=build /opt/triptych /opt/triptych",
    }


def test_the_pinned_torch_is_one_that_the_workers_take():
    from packaging.requirements import Requirement

    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = [line.partition("==")[2] for line in pins if line.startswith("torch==")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [Requirement(line) for line in extras["worker"] if line.startswith("torch")]
    assert wanted.specifier.contains(pinned)
    for name in WORKERS:
        assert re.search(
            r"-c constraints.txt \$\{PIP_TORCH_ARGS\} torch ", read(name).stages[0].all("RUN")[1]
        )
    assert not any("torch" in rest for stage in read("proxy").stages for _, rest in stage.instructions)


def test_what_is_copied_is_there_and_let_into_the_context(dockerfile):
    allowed = included()
    for rest in dockerfile.stages[0].all("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists()
            assert source == "." or source in allowed
    assert "deploy/docker/healthcheck.py" in allowed


def test_the_context_has_every_package_and_nothing_secret():
    allowed = included()
    links = [path for path in (ROOT / "triptych").iterdir() if path.is_symlink()]
    assert links
    for link in links:
        assert str(link.resolve().relative_to(ROOT)) in allowed
    assert not {".git", ".venv", "tests", "deploy", "benchmarks", "docs"} & set(allowed)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"README.md", "setup.py", *project["license-files"]} <= set(allowed)


def test_the_image_of_vllm_gets_what_the_tests_give_the_connector_and_leaves_vllms_packages_alone() -> None:
    dockerfile = read("worker-vllm")
    (given,) = re.findall(
        r"--target \S+ -c \S+ \\\n\s+(.+)$", (ROOT / "tests/tools/vllm.sh").read_text(), re.M
    )
    first, second = (one for one in dockerfile.final.all("RUN"))
    # async-timeout is for a Python below that of vLLM's image.
    assert set(given.split()) - {"async-timeout"} == set(first.partition("constraints.txt ")[2].split())
    assert "--no-deps" in first
    assert "--no-deps ." in second
    assert dockerfile.final.all("USER") == ["65532:65532"]
