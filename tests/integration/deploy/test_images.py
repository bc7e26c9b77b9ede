"""The images of the proxy and of CPU workers: built, looked into, run, and asked."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.docker.host_pip import local_paths, settings
from support.images.container import Container
from support.images.image_store import BASE, ROOT, ImageStore, host_pip_words, image_store
from support.processes.cluster import free_port, wait_for
from triptych.apps.launch.embedded_store import find_server_binary
from triptych.demo import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROXY, WORKER = "localhost/triptych-proxy", "localhost/triptych-worker-cpu"
#: Most that the proxy's image may add to its base.
PROXY_MEGABYTES = 120
SITE = Path("opt/triptych/lib/python3.11/site-packages")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageStore]:
    with image_store(tmp_path_factory.mktemp("images")) as store:
        store.make_base()
        words = host_pip_words()
        assert store.build("proxy", words) == PROXY
        assert store.build("worker-cpu", words) == WORKER
        yield store


@pytest.fixture(params=[PROXY, WORKER])
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_image_runs_triptych_as_a_user_without_rights(images, image):
    configuration = images.configuration(image)
    assert configuration["User"] == "65532:65532"
    assert configuration["Entrypoint"] == ["triptych"]
    assert configuration["StopSignal"] == "SIGTERM"
    assert configuration["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    passwd = (images.mounted(image) / "etc/passwd").read_text()
    assert "triptych:x:65532:65532:triptych:/tmp:" in passwd


def test_the_proxy_s_image_is_small_and_has_no_model_code(images, record_property):
    base, proxy, worker = (images.megabytes(name) for name in (BASE, PROXY, WORKER))
    record_property("megabytes", {"base": base, "proxy": proxy, "worker-cpu": worker})
    record_property("build_seconds", images.build_seconds)
    print(f"base {base:.0f} MB, proxy +{proxy - base:.0f} MB, worker-cpu +{worker - base:.0f} MB")
    print("built in", {name: f"{seconds:.0f} s" for name, seconds in images.build_seconds.items()})
    assert proxy - base <= PROXY_MEGABYTES
    packages = {path.name for path in (images.mounted(PROXY) / SITE).iterdir()}
    assert "grpc" in packages
    assert not packages & {"torch", "transformers", "numpy", "PIL", "ray", "pip", "setuptools"}


def test_the_workers_image_has_the_kernels_and_no_compiler(images):
    root = images.mounted(WORKER)
    assert list((root / SITE / "triptych/kernels").glob("triptych_kernels-*.so"))
    assert not (root / "usr/bin/g++").exists()


def test_nothing_of_the_building_machine_is_left(images, image):
    root = images.mounted(image)
    for place in ("build", "root/.cache", "etc/pip.conf"):
        assert not (root / place).exists(), place
    certificates = "etc/ssl/certs/ca-certificates.crt"
    assert (root / certificates).read_bytes() == (images.mounted(BASE) / certificates).read_bytes()
    words = [str(ROOT), str(images.folder), "images-pip.conf", *_local_places()]
    patterns = "\n".join(words)
    searched = [str(root / place) for place in ("etc", "home", "opt", "root", "tmp", "var")]
    found = subprocess.run(
        ["grep", "-rlF", "-f", "-", *searched], input=patterns, capture_output=True, text=True, timeout=300
    )
    assert found.stdout == ""
    history = images.history(image)
    assert not [word for word in words if word in history]
    assert not re.search(r"https?://", history)


def _local_places() -> list[str]:
    """Folders and indexes of this machine that packages came from."""
    listing = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = settings(listing)
    folders = [str(path) for path in local_paths(found) if path.is_dir()]
    addresses = " ".join(found.get(key, "") for key in ("index-url", "extra-index-url")).split()
    return [*folders, *(address for address in addresses if "://pypi.org/" not in address)]


Start = Callable[..., Container]


@pytest.fixture
def start(images: ImageStore, tmp_path: Path) -> Iterator[Start]:
    """Starts a container: start(name, image, words...)."""
    running: list[Container] = []

    def run(name: str, image: str, *words: str, writable_tmp: bool = True, **variables: str) -> Container:
        made = images.configuration(image), images.mounted(image)
        running.append(Container(tmp_path, name, made, words, variables, writable_tmp=writable_tmp))
        return running[-1]

    yield run
    for container in running:
        container.stop()


@pytest.fixture
def store_port(tmp_path: Path) -> Iterator[int]:
    """A Valkey on loopback."""
    port = free_port()
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen([str(find_server_binary()), *words], stdout=subprocess.DEVNULL) as server:
        yield port
        server.terminate()


def test_the_containers_answer_about_a_picture_and_drain_on_sigterm(start, store_port):
    store, port, metrics = f"redis://127.0.0.1:{store_port}/0", free_port(), free_port()
    proxy = start(
        "proxy", PROXY, "proxy", "--port", str(port), "--grpc-port", str(free_port()),
        TRIPTYCH_STORE=store, TRIPTYCH_METRICS_PORT=str(metrics),
    )  # fmt: skip
    encoder, pd = (
        start(kind, WORKER, kind, "--store", store, "--metrics-port", str(free_port()))
        for kind in ("encoder", "pd")
    )
    containers = (proxy, encoder, pd)
    wait_for("the containers", lambda: _ready(port) or any(each.ended() for each in containers))
    assert not any(each.ended() for each in containers), [each.log.read_text() for each in containers]
    assert all(each.healthy() for each in containers)
    assert {int(_status(each.pid(), "Uid").split()[0]) for each in containers} == {65532}
    request = json.loads(examples.EXAMPLE_REQUEST.read_text())
    whole = "".join(_stream(port, request))
    assert whole == examples.EXPECTED_ANSWER

    long = request | {"max_tokens": 400, "ignore_eos": True}
    expected = "".join(_stream(port, long))
    parts = _stream(port, long)
    begun = next(parts)
    for each in containers:
        each.terminate()
    assert begun + "".join(parts) == expected
    assert [each.wait() for each in containers] == [0, 0, 0], [each.log.read_text() for each in containers]


SERVICES = [(PROXY, "proxy"), (WORKER, "encoder"), (WORKER, "pd")]


@pytest.mark.parametrize(("image", "command"), SERVICES)
def test_a_container_that_is_stopped_while_it_starts_ends_at_once(start, image, command):
    container = start("starting", image, command, TRIPTYCH_STORE=f"redis://127.0.0.1:{free_port()}/0")
    wait_for("a handler of SIGTERM", lambda: _handles_sigterm(container.pid()))
    container.terminate()
    assert container.wait() == 128 + signal.SIGTERM, container.log.read_text()


def _ready(port: int) -> bool:
    """Whether the proxy has workers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _stream(port: int, request: dict[str, object]) -> Iterator[str]:
    """The texts of a streamed answer; AssertionError for one that ends early."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(request | {"stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            connection.close()
            return
        if data:
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            yield "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    raise AssertionError("the answer ended early")


def _status(pid: int, key: str) -> str:
    """One line of a process's status; "" for a process that is none."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return ""
    return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(f"{key}:"))


def _handles_sigterm(pid: int) -> bool:
    caught = _status(pid, "SigCgt") if pid else ""
    return bool(caught) and bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
