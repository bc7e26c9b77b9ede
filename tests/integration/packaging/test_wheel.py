"""A release as `make dist` builds it: wheels in new environments outside of the checkout, archive, chart."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from hashlib import sha256
from pathlib import Path
from urllib.request import urlopen

import pytest
from helm_python.chart import Chart, expand, lint

from support.kubernetes.chart import CASES, EXAMPLES, Manifest, case, example, manifests_of
from support.processes.cluster import PATIENCE, free_port, wait_for
from triptych import __version__

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
#: What works with each set of extras, as the words of a command line.
WORKS = {
    "": [
        "triptych --version",
        "triptych proxy --help",
        "python -c 'import triptych.proxy.service'",
        'python -c \'from importlib.util import find_spec as f; assert not any(map(f, ("torch", "numpy")))\'',
    ],
    "client": ["python -c 'import triptych; triptych.Client'", "triptych ask --help"],
    "top": ["python -c 'import triptych.apps.cli.top.screen, triptych; triptych.Client'"],
    "doctor": ["triptych doctor --port 0 --grpc-port 0"],
    "cert": ["triptych cert tls"],
    "video": ["python -c 'import av'"],
    "otel": ["python -c 'import opentelemetry.sdk.trace, triptych.base.tracing.otlp'"],
    "ray": ["python -c 'import ray, triptych.apps.launch.ray.connection'", "triptych cert tls"],
    "worker,embedded,client,doctor": [
        "triptych doctor --port 0 --grpc-port 0",
        "triptych tones 555 -o tones.wav",
        "triptych check",
    ],
}
#: What works with triptych-bench beside the core, and with its extra.
BENCH_WORKS = {
    "": [
        "triptych bench workloads",
        "triptych plan --gpu l4 --workload image --devices 2 --quick --output-tokens 8 --plot plan.svg",
    ],
    "[photos]": [
        "python -c 'from triptych_bench.goodput.load.pictures import *; draw(Picture(0, 64, 64, \"photos\"))'"
    ],
}
#: vLLM brings a torch of its own, for the machine that it runs on: tests/with_vllm has an environment of it.
ELSEWHERE = {"vllm"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def outside() -> dict[str, str]:
    """The variables without those that lead into the checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def run(*words: str | Path, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The command, in an environment that knows nothing of the checkout."""
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env=outside(),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0 or not check, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with everything that a release is made of: that of TRIPTYCH_DIST, else built here."""
    if built := os.environ.get("TRIPTYCH_DIST"):
        return Path(built).resolve()
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, ROOT / "deploy" / "distributions.py", target, folder=target)
    return target


@pytest.fixture(scope="module")
def wheels(release: Path) -> tuple[Path, Path]:
    """triptych and triptych-bench."""
    [core] = release.glob("triptych-*.whl")
    [bench] = release.glob("triptych_bench-*.whl")
    return core, bench


@pytest.fixture(scope="module")
def wheel(wheels: tuple[Path, Path]) -> Path:
    return wheels[0]


def test_every_extra_is_tried() -> None:
    tried = {extra for extras in WORKS for extra in extras.split(",") if extra}
    assert tried | ELSEWHERE == EXTRAS


def test_the_release_is_two_wheels_an_archive_and_a_chart_of_one_version_and_their_sums(
    release: Path,
) -> None:
    lines = (release / "SHA256SUMS").read_text().splitlines()
    sums = {line.split()[1]: line.split()[0] for line in lines}
    assert {file.name for file in release.iterdir()} == {*sums, "SHA256SUMS"}
    for name, value in sums.items():
        assert sha256((release / name).read_bytes()).hexdigest() == value
    assert sorted(re.sub(r"py3-none-\w+", "TAG", name) for name in sums) == [
        f"triptych-{__version__}-TAG.whl",
        f"triptych-{__version__}.tar.gz",
        f"triptych-{__version__}.tgz",
        f"triptych_bench-{__version__}-TAG.whl",
    ]
    again = run(sys.executable, ROOT / "deploy" / "distributions.py", release, folder=ROOT, check=False)
    assert again.returncode and "is not empty: give a new folder" in again.stderr


def test_the_source_archive_has_every_file_that_the_wheel_has(release: Path, wheel: Path) -> None:
    with tarfile.open(release / f"triptych-{__version__}.tar.gz") as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as built:
        installed = {name for name in built.namelist() if name.startswith("triptych/")}
    compiled = {name for name in installed if name.endswith(".so")}
    assert installed - compiled <= sources
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md"} <= sources
    assert len(compiled) == (1 if shutil.which(os.environ.get("CXX") or "g++") else 0)


def test_the_chart_is_linted_and_rendered_from_its_package(release: Path, tmp_path: Path) -> None:
    package = release / f"triptych-{__version__}.tgz"
    expand(tmp_path, package)
    # Who installs from a registry has no checkout: `helm pull --untar` gives them the examples.
    assert {file.name for file in (tmp_path / "triptych" / "examples").iterdir()} == {
        file.name for file in EXAMPLES.iterdir()
    }
    with Chart.load(package) as chart:
        for name in CASES:
            values = {} if name == "defaults" else example(name)
            report = lint(package, values, strict=True)
            assert report["total_charts_linted"] == 1 and not report["errors"], (name, report)
            rendered = chart.render(values, name="triptych", namespace="default")
            for manifest, expected in zip(manifests_of(rendered), case(name), strict=True):
                assert without_secrets(manifest) == without_secrets(expected), name


def without_secrets(manifest: Manifest) -> Manifest:
    """The manifest without what is random in every rendering."""
    return {
        key: value for key, value in manifest.items() if manifest["kind"] != "Secret" or key != "stringData"
    }


def test_the_wheel_says_what_it_is_and_has_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [about] = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(about).decode())
    assert {name.partition("/")[0] for name in names} == {"triptych", about.partition("/")[0]}
    assert metadata["Author"] == "The Triptych authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier", [])
    assert str(metadata.get_payload()).startswith("# Triptych")


def test_the_wheel_of_bench_has_every_module_of_it_and_is_of_the_same_release(
    wheels: tuple[Path, Path],
) -> None:
    core, bench = wheels
    assert core.name.split("-")[1] == bench.name.split("-")[1] == __version__
    with zipfile.ZipFile(bench) as archive:
        found = {name for name in archive.namelist() if name.endswith(".py")}
        [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(about).decode())
    assert found == {str(path.relative_to(ROOT)) for path in (ROOT / "triptych_bench").rglob("*.py")}
    assert f"triptych=={__version__}" in metadata.get_all("Requires-Dist", [])


def new_environment(folder: Path) -> tuple[Path, tuple[str | Path, ...]]:
    """Its programs' folder, and the words that install there."""
    run(sys.executable, "-m", "venv", folder / "environment", folder=folder)
    programs = folder / "environment" / "bin"
    return programs, (programs / "python", "-m", "pip", "install", "-q")


def works(programs: Path, lines: list[str], folder: Path) -> None:
    for line in lines:
        program, *words = shlex.split(line)
        run(programs / program, *words, folder=folder)


def a_cluster_answers_a_picture(programs: Path, folder: Path) -> None:
    """`triptych serve` of what is installed there, asked by its own client, and ended by SIGINT."""
    port = free_port()
    words = [
        programs / "triptych",
        "serve",
        "--encoders",
        "1",
        "--port",
        str(port),
        "--grpc-port",
        str(free_port()),
    ]
    with (folder / "serve.log").open("w") as log:
        serving = subprocess.Popen(words, cwd=folder, env=outside(), stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for("the cluster of the wheels", lambda: answers(f"http://127.0.0.1:{port}/ready"), PATIENCE)
        image = next(
            folder.glob("environment/lib/python*/site-packages/triptych/demo/examples/two_shapes.png")
        )
        question = ["ask", "What is in the image?", "--url", f"http://127.0.0.1:{port}", "--image", image]
        answer = run(programs / "triptych", *question, folder=folder).stdout
        assert "A red circle at the top left and a blue square at the bottom right." in answer
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=60) == 0
    finally:
        serving.kill()


def answers(url: str) -> bool:
    """Whether the page is answered with 200."""
    with contextlib.suppress(OSError), urlopen(url, timeout=5) as reply:
        return bool(reply.status == 200)
    return False


@pytest.mark.parametrize("extra", [pytest.param(extra, id=extra or "bench") for extra in BENCH_WORKS])
def test_bench_and_plan_work_with_triptych_bench(
    wheels: tuple[Path, Path], tmp_path: Path, extra: str
) -> None:
    programs, install = new_environment(tmp_path)
    run(*install, *CONSTRAINTS, wheels[0], f"{wheels[1]}{extra}", folder=tmp_path)
    works(programs, BENCH_WORKS[extra], tmp_path)


@pytest.mark.parametrize("extras", [pytest.param(extras, id=extras or "core") for extras in WORKS])
def test_the_wheel_works_in_a_new_environment(wheel: Path, tmp_path: Path, extras: str) -> None:
    programs, pip = new_environment(tmp_path)
    if "worker" in extras and (words := os.environ.get("PIP_TORCH_ARGS")):
        [torch] = [
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
        ]
        run(*pip, *shlex.split(words), torch, folder=tmp_path)
    run(*pip, *CONSTRAINTS, f"{wheel}[{extras}]" if extras else wheel, folder=tmp_path)
    works(programs, WORKS[extras], tmp_path)
    if "worker" in extras:
        a_cluster_answers_a_picture(programs, tmp_path)
    where = "import triptych; print(triptych.__file__)"
    assert run(programs / "python", "-c", where, folder=tmp_path).stdout.startswith(str(tmp_path))
    if not extras:
        for command, remedy in (("check", "'triptych[worker]'"), ("plan", "triptych-bench")):
            refused = run(programs / "triptych", command, folder=tmp_path, check=False)
            assert refused.returncode and f"pip install {remedy}" in refused.stderr
        client = "import triptych; triptych.Client"
        refused = run(programs / "python", "-c", client, folder=tmp_path, check=False)
        assert refused.returncode and "pip install 'triptych[client]'" in refused.stderr
