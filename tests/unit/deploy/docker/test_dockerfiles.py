"""The images' files, and their health check."""

from __future__ import annotations

import http.server
import re
import socket
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.docker.healthcheck import address, healthy
from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig
from triptych.base.config.flags import flags_of
from triptych.base.status_server import ServiceStatus, status_server

FOLDER = Path(__file__).parents[4] / "deploy" / "docker"
NAMES = ("proxy", "worker-cpu", "worker-cuda")


@dataclass
class Stage:
    """The instructions from one FROM to the next, as (word, rest)."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """What follows `word`, for each instruction of that name."""
        return [rest for name, rest in self.instructions if name == word]

    def only(self, word: str) -> str:
        """What follows the one instruction named `word`."""
        (rest,) = self.all(word)
        return rest

    def variables(self) -> dict[str, str]:
        """The environment that the image gives its containers."""
        return dict(pair.split("=", 1) for rest in self.all("ENV") for pair in rest.split())


@dataclass
class Dockerfile:
    """One Dockerfile: the ARGs before the first FROM, then its stages."""

    name: str
    text: str
    arguments: dict[str, str]
    stages: list[Stage]

    @property
    def final(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]


def read(name: str) -> Dockerfile:
    """The Dockerfile of the image `name`."""
    text = (FOLDER / f"{name}.Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in joined.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append(Stage(rest))
        elif stages:
            stages[-1].instructions.append((word, rest.strip()))
        else:
            key, _, value = rest.partition("=")
            arguments[key] = value
    return Dockerfile(name, text, arguments, stages)


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


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("triptych proxy", {"TRIPTYCH_METRICS_PORT": "9100"}, ("127.0.0.1", 9100)),
        ("triptych proxy", {}, ("127.0.0.1", 9100)),
        ("triptych pd --metrics-port 9200", {"TRIPTYCH_METRICS_PORT": "9100"}, ("127.0.0.1", 9200)),
        ("triptych pd --metrics-port=9200 --host=10.0.0.7", {}, ("10.0.0.7", 9200)),
        ("triptych pd --host 0.0.0.0", {}, ("127.0.0.1", 9100)),
        ("triptych pd", {"TRIPTYCH_HOST": "::"}, ("127.0.0.1", 9100)),
        ("triptych proxy --host 0.0.0.0 --metrics-host 127.0.1.7", {}, ("127.0.1.7", 9100)),
        ("init -- triptych proxy --metrics-port 1 --metrics-port 2", {}, ("127.0.0.1", 2)),
    ],
)
def test_it_asks_where_the_service_listens(command, environment, expected):
    assert address(command.split(), environment) == expected


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    """Answers 200 to GET /health and 503 to all else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == self.server.healthy_path else 503)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.healthy_path = "/health"
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_service_is_healthy_where_it_answers_200(server):
    assert healthy("127.0.0.1", server.server_port)
    server.healthy_path = ""
    assert not healthy("127.0.0.1", server.server_port)


def test_a_service_s_own_answer_counts_while_it_starts_drains_and_stalls():
    status, healthy_now = ServiceStatus(), [True]
    status.follow(lambda: healthy_now[0])
    with status_server("127.0.0.1", 0, status) as server:
        assert healthy("127.0.0.1", server.server_port)
        status.ready()
        status.drain()
        assert healthy("127.0.0.1", server.server_port)
        healthy_now[0] = False
        assert not healthy("127.0.0.1", server.server_port)


def test_a_service_that_does_not_listen_is_not_healthy():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert not healthy("127.0.0.1", probe.getsockname()[1])
