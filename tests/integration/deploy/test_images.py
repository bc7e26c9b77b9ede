"""The images of the proxy and of CPU workers: built, looked into, run, and asked."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.docker.host_pip import local_paths, settings
from support.processes.cluster import PATIENCE, free_port, wait_for
from triptych.apps.launch.embedded_store import find_server_binary
from triptych.demo import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy" / "docker"
BASE = "docker.io/library/python:3.11-slim"
#: Longest build, in seconds; a busy machine takes ten minutes for the workers'.
BUILD_PATIENCE = 1800.0


def check_programs() -> None:
    """AssertionError, with the remedy, where images can be neither built nor run."""
    missing = [name for name in ("buildah", "crun", "mmdebstrap", "unshare") if not shutil.which(name)]
    remedy = "apt-get install --no-install-recommends buildah crun mmdebstrap util-linux"
    assert not missing, f"{', '.join(missing)} missing: {remedy}"
    assert os.geteuid() == 0, "images are built and run in chroots here, which takes root"


class ImageStore:
    """A storage of images in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Seconds that each image took to build.
        self.build_seconds: dict[str, float] = {}
        self._mounts: dict[str, Path] = {}
        self._environment = os.environ | {"IMAGE_BUILDER": "buildah", "TMPDIR": str(folder)}
        self._environment["CONTAINERS_STORAGE_CONF"] = str(folder / "storage.conf")
        self._choose_driver()

    def _choose_driver(self) -> None:
        """Layers are mounted, or copied where the kernel has no overlay for this folder."""
        for driver in ("overlay", "vfs"):
            words = f'driver = "{driver}"\nrunroot = "{self.folder}/run"\ngraphroot = "{self.folder}/root"'
            (self.folder / "storage.conf").write_text(f"[storage]\n{words}\n")
            self._environment["STORAGE_DRIVER"] = driver
            works = subprocess.run(
                ["buildah", "info"], env=self._environment, capture_output=True, timeout=BUILD_PATIENCE
            )
            if works.returncode == 0:
                return

    def make_base(self) -> None:
        """Makes the image that the Dockerfiles build on."""
        self._run("sh", str(DOCKER / "base.sh"))

    def build(self, target: str, arguments: str) -> str:
        """Builds an image as `make images` does, with more `arguments` for the builder; returns its name."""
        started = time.monotonic()
        self._environment["IMAGE_BUILD_ARGS"] = arguments
        self._run("sh", str(DOCKER / "build.sh"), target)
        self.build_seconds[target] = time.monotonic() - started
        return f"localhost/triptych-{target}"

    def configuration(self, image: str) -> dict[str, Any]:
        """What the image says of its containers, in Docker's words."""
        found: dict[str, Any] = self._inspect(image)["Docker"]["config"]
        return found

    def history(self, image: str) -> str:
        """What is kept of how the image was made."""
        return json.dumps(self._inspect(image)["Docker"]["history"])

    def mounted(self, image: str) -> Path:
        """The folder with the image's files."""
        if image not in self._mounts:
            container = self._run("buildah", "from", "--pull-never", self._tagged(image)).strip()
            self._mounts[image] = Path(self._run("buildah", "mount", container).strip())
        return self._mounts[image]

    def megabytes(self, image: str) -> float:
        """Size of the image's files."""
        return int(self._run("du", "-sb", str(self.mounted(image))).split()[0]) / 1e6

    def unmount(self) -> None:
        """Unmounts every image."""
        self._run("buildah", "rm", "--all")

    def _inspect(self, image: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self._run("buildah", "inspect", "--type", "image", self._tagged(image))
        )
        return found

    def _tagged(self, image: str) -> str:
        from triptych import __version__

        return image if image == BASE else f"{image}:{__version__}"

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environment, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_PATIENCE
        )
        words = f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, words
        return done.stdout


@contextmanager
def image_store(folder: Path) -> Iterator[ImageStore]:
    """A storage that leaves nothing behind; its images are gigabytes."""
    check_programs()
    store = ImageStore(folder)
    try:
        yield store
    finally:
        store.unmount()
        shutil.rmtree(folder)


def host_pip_words() -> str:
    """The builder's words for this machine's own pip settings."""
    command = [sys.executable, str(DOCKER / "host_pip.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


#: crun takes a machine with version 2 of cgroups alone; where both are mounted it gets a view of the second.
_CRUN = """
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
  umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup
fi
exec crun "$@"
"""
_TMPFS = ("nosuid", "nodev", "mode=1777")
_MOUNTS = (("/proc", "proc", ()), ("/dev", "tmpfs", ("nosuid", "mode=755")), ("/dev/shm", "tmpfs", _TMPFS))


class Container:
    """A running container of an image, given as its configuration and files, with `words` as its command."""

    def __init__(
        self,
        folder: Path,
        name: str,
        image: tuple[Mapping[str, Any], Path],
        words: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        writable_tmp: bool = True,
    ) -> None:
        self._folder, self.name, self._state = folder / name, name, folder / "crun"
        self._configuration, root = image
        self._folder.mkdir()
        self.log = self._folder / "log"
        bundle = _bundle(self._configuration, root, words, variables or {})
        bundle["mounts"] += [_mount("/tmp", "tmpfs", _TMPFS)] if writable_tmp else []
        (self._folder / "config.json").write_text(json.dumps(bundle))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._crun("run", "-b", str(self._folder), name),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether the container's first process has ended."""
        return self.process.poll() is not None

    def pid(self) -> int:
        """The first process as the host counts it; 0 while there is none."""
        done = subprocess.run(self._crun("state", self.name), capture_output=True, text=True, timeout=60)
        return int(json.loads(done.stdout)["pid"]) if done.returncode == 0 else 0

    def terminate(self) -> None:
        """Sends the image's stop signal."""
        signal = str(self._configuration["StopSignal"])
        subprocess.run(self._crun("kill", self.name, signal), check=True, capture_output=True, timeout=60)

    def wait(self) -> int:
        """The exit code, when the container has ended."""
        return self.process.wait(PATIENCE)

    def healthy(self) -> bool:
        """What the image's HEALTHCHECK says inside the container."""
        word, *command = self._configuration["Healthcheck"]["Test"]
        assert word == "CMD"
        done = subprocess.run(self._crun("exec", self.name, *command), capture_output=True, timeout=60)
        return done.returncode == 0

    def stop(self) -> None:
        """Kills what still runs."""
        subprocess.run(self._crun("delete", "-f", self.name), capture_output=True, timeout=60)
        self.process.wait(60)

    def _crun(self, *words: str) -> list[str]:
        options = ("--root", str(self._state), "--cgroup-manager=disabled")
        return ["unshare", "-m", "sh", "-c", _CRUN, "sh", *options, *words]


def _mount(place: str, kind: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": kind, "options": list(options)}


def _bundle(
    configuration: Mapping[str, Any], root: Path, words: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration that an OCI runtime reads."""
    user, group = (int(part) for part in configuration["User"].split(":"))
    kinds = ("bounding", "effective", "inheritable", "permitted", "ambient")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user, "gid": group},
            "args": [*configuration["Entrypoint"], *(words or configuration["Cmd"])],
            "env": [*configuration["Env"], *(f"{key}={value}" for key, value in variables.items())],
            "cwd": configuration["WorkingDir"],
            "noNewPrivileges": True,
            "capabilities": {kind: [] for kind in kinds},
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [_mount(*mount) for mount in _MOUNTS],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
    }


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
