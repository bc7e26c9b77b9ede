"""The fourth part on a GPU: what is deployed, an encoder worker and vLLM behind our proxy; and vLLM alone."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.part_page import PartPage
from benchmarks.gpu.random_models import fill_weights, write_model
from benchmarks.micro import vllm_paths
from benchmarks.micro.hot_paths import plan_of
from benchmarks.result_page import number
from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device
from triptych.base.parent import supervised
from triptych.integrations.vllm.host_copies import HostCopies, locked_pool
from triptych.integrations.vllm.rows import read_rows, source_of
from triptych.pd_worker.vllm.connection import vllm_program
from triptych_bench.goodput.launch import answers, calibrate, find_model, free_ports, launched, parse_shape
from triptych_bench.goodput.load.job import Target
from triptych_bench.goodput.load.workload import Arrivals, Workload
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.goodput.measure.window import MeasuredWindow, RunSettings, measure
from triptych_bench.goodput.report.result import window_fields

_ROOT = Path(__file__).resolve().parents[2]
#: What our connector needs in vLLM's environment and vLLM does not bring.
_BROUGHT = ("blake3", "hiredis", "msgpack", "redis", "xxhash")
#: Stages of our server that are on the page.
_STAGES = {"encode": "tower", "save": "save", "load": "load"}
_NOT_RUN = "vLLM is not installed here: what is deployed was not measured. `pip install vllm` beside torch."


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a GPU, or of a rehearsal: `seconds` of a window at a rate, and those until a system must answer."""

    rates: tuple[float, ...]
    seconds: float
    workload: Workload
    slo: Slo
    serve: tuple[str, ...]
    vllm: tuple[str, ...]
    start: float
    repeats: int


_WORK = Workload(text_tokens=200, output_tokens=128, images=((1, 1.0),), sizes=((1280, 720, 1.0),))
_GPU = Sizes(
    (1, 4, 8), 20, _WORK, Slo((("ttft", 1000.0), ("tpot", 50.0))),
    ("--device", "cuda", "--dtype", "bfloat16"),
    ("--dtype", "bfloat16", "--max-model-len", "8192"), 150, 5,
)  # fmt: skip
_CPU = Sizes(
    (1,), 5, replace(_WORK, text_tokens=8, output_tokens=4, sizes=((96, 96, 1.0),)),
    Slo((("ttft", 10_000.0), ("tpot", 1_000.0))),
    ("--dtype", "float32", "--threads", "1"), ("--dtype", "float32", "--max-model-len", "1024"), 200, 1,
)  # fmt: skip
_COLUMNS = (
    "requests/s",
    "answered",
    "failed",
    "goodput/s",
    "TTFT median, P99",
    "TPOT median, P99",
    "stages, median",
)


def run(page: PartPage, device: str, *, small: bool) -> None:
    """The whole part; `small` where no GPU is there."""
    sizes, target = _CPU if small else _GPU, torch.device(device)
    Device.of(target).open()
    until = time.monotonic() + 7.5 * 60
    with page.case("transfers into vLLM"):
        _transfers(page, target, sizes.repeats)
    program = vllm_program()
    if not program:
        page.write(f"\n{_NOT_RUN}")
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{_links(Path(folder) / 'packages')}"
        with page.case("random weights"):
            path = fill_weights(write_model("qwen3_vl", Path(folder) / "model", small=small), target)
            Device.of(target).empty_cache()
        with page.case("Triptych before vLLM"), _triptych(str(path), sizes) as url:
            _rates(page, "Triptych before vLLM", url, sizes, until)
        with page.case("vLLM alone"), _vllm_alone(program, str(path), sizes, Path(folder) / "log") as url:
            _rates(page, "vLLM alone", url, sizes, until)


def _links(folder: Path) -> Path:
    """A folder with the packages of this environment that vLLM's may lack, and no others."""
    folder.mkdir()
    for name in _BROUGHT:
        found = find_spec(name)
        if found is None or not found.submodule_search_locations:
            raise ConfigError(f"{name} is not installed: pip install -r tests/gpu/requirements.txt")
        (folder / name).symlink_to(found.submodule_search_locations[0])
    return folder


@contextlib.contextmanager
def _triptych(path: str, sizes: Sizes) -> Iterator[str]:
    words = ("--engine", "vllm", "--log-level", "warning", *sizes.serve)
    with launched(parse_shape("1E1PD"), path, words, sizes.start) as cluster:
        yield cluster.url


@contextlib.contextmanager
def _vllm_alone(program: str, path: str, sizes: Sizes, log: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command, environment = supervised([program, "serve", path, "--port", str(port), *sizes.vllm])
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + sizes.start
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"vLLM does not answer: {log.read_text(errors='replace')[-400:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _rates(page: PartPage, name: str, url: str, sizes: Sizes, until: float) -> None:
    target = Target(url, "", first_token="text")
    target = find_model(target)
    base = RunSettings(
        target=target, workload=sizes.workload, workload_name="pictures", slo=sizes.slo,
        seconds=sizes.seconds, warm_up=sizes.seconds / 4, words_per_token=calibrate(target),
    )  # fmt: skip
    page.table(name, *_COLUMNS)
    for index, rate in enumerate(sizes.rates):
        if time.monotonic() + 2 * sizes.seconds > until:
            page.row(name, number(rate), "did not fit into the part's time", *[""] * 5)
            continue
        with page.case(f"{name} at {rate:g}/s"):
            window = measure(replace(base, arrivals=Arrivals(rate=rate)), index)
            page.row(name, number(rate), *_cells(window))


def _cells(window: MeasuredWindow) -> Sequence[str]:
    fields = window_fields(window)
    records = [record for record in window.report.records if not record.warm_up and record.ok]
    stages = []
    for stage, name in _STAGES.items():
        seconds = [record.stages[stage] for record in records if stage in record.stages]
        if seconds:
            stages.append(f"{name} {statistics.median(seconds) * 1e3:.1f}")
    times = [
        f"{number(fields[f'median_{name}_ms'])}, {number(fields[f'p99_{name}_ms'])} ms"
        for name in ("ttft", "tpot")
    ]
    counts = (str(fields["completed"]), str(fields["failed"]), number(fields["request_goodput"]))
    return [*counts, *times, (", ".join(stages) + " ms") if stages else "not said"]


def _transfers(page: PartPage, device: torch.device, repeats: int) -> None:
    """From the tower's output in host memory to vLLM's rows, and the last step alone: onto the device."""
    rounds = vllm_paths.on_one_host(repeats, 1, ranks=False)
    page.table("embedding", "path", "ms to rows on the host", "of the store's", "ms of host to device")
    for (size, path), milliseconds in rounds[0].items():
        share = milliseconds / rounds[0][size, "store"]
        page.row(
            size, path, f"{milliseconds:.1f}", f"{share:.2f}", f"{_to_device(size, device, repeats):.2f}"
        )


def _to_device(size: str, device: torch.device, repeats: int) -> float:
    rows, width = vllm_paths.SIZES[size]
    pool = locked_pool(1 << 28, device) if device.type != "cpu" else None
    copy = HostCopies(1 << 28, pool=pool).allocate(plan_of(size, rows, width))
    assert not isinstance(copy, int)
    stream = Device.of(device).copy_stream()
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        read_rows(source_of(copy), device, torch.bfloat16, stream)
        stream.synchronize()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken[1:])
