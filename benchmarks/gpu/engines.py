"""The second part on a GPU: steps of a Qwen3-VL-8B, of a Whisper and of a BART, and where their time goes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.device_limits import DeviceLimits, decoder_size, known_limits, measured_limits
from benchmarks.gpu.engine import COLUMNS, EngineBench
from benchmarks.gpu.engine_rounds import engine_step, make_engine, start_all, synchronize
from benchmarks.gpu.part_page import PartPage
from benchmarks.gpu.random_models import random_weights, write_model
from triptych.base.config import GIB, MIB
from triptych.base.machine.device import Device
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.models.base import DecoderSide
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.engine import Engine

#: Operators of a profile that are shown, and the steps that it is taken over.
_SHOWN, _PROFILED = 15, 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: of a GPU, or of a rehearsal."""

    dtype: torch.dtype
    batches: tuple[int, ...]
    context: int
    prefills: tuple[int, ...]
    chunk: int
    tokens: int
    repeats: int
    kv_memory: int
    #: Sequences and rows of encoder-decoder models.
    cross_batches: tuple[int, ...]
    text_rows: int
    graphs: str


_GPU = Sizes(
    torch.bfloat16, (1, 16, 64, 128), 1100, (2048, 8192, 32768), 8192, 160, 1, 26 * GIB, (1, 16, 64), 512,
    "cuda",
)  # fmt: skip
_CPU = Sizes(torch.float32, (1, 4), 24, (32, 96), 64, 12, 1, 64 * MIB, (1, 4), 32, "static")


def run(page: PartPage, device: str, *, small: bool) -> None:
    """The whole part; `small` where no GPU is there."""
    sizes, target = _CPU if small else _GPU, torch.device(device)
    Device.of(target).open()
    limits = DeviceLimits(1.0, 1.0)
    with page.case("limits of the device"):
        limits, measured = known_limits(device, sizes.dtype), measured_limits(device, sizes.dtype)
        page.write(f"{limits.said()} Measured here: {measured.bandwidth / 1e9:.0f} GB/s, "
                   f"{measured.flops / 1e12:.2f} TFLOP/s.")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for family, steps in (("qwen3_vl", _decoder_only), ("whisper", _cross), ("bart", _cross)):
            with page.case(f"random {family}"):
                path = write_model(family, Path(folder) / family, small=small)
                with random_weights(target, sizes.dtype):
                    decoder = load_decoder(
                        path, device=target, dtype=sizes.dtype, attn_implementation=ATTENTION_NAME
                    )
                steps(page, path, decoder, sizes, limits)
                del decoder
                Device.of(target).empty_cache()


def _decoder_only(
    page: PartPage, path: Path, decoder: DecoderSide, sizes: Sizes, limits: DeviceLimits
) -> None:
    size, device, longest = decoder_size(decoder), decoder.device.type, max(*sizes.prefills, 64)
    page.write(f"\nQwen3-VL: {size.weight_bytes / 1e9:.2f} GB of weights, {size.token_bytes} bytes a token.")

    def bench(length: int, seqs: int, **flags: Any) -> EngineBench:
        engine = _engine(path, decoder, sizes, max_model_len=length, max_num_seqs=seqs, **flags)
        return EngineBench(engine, size, device, limits, sizes.repeats)

    made = bench(longest + 1, max(sizes.batches))
    page.table(*COLUMNS)
    for sampled, how in ((False, ", greedy"), (True, ", sampled")):
        for batch in sizes.batches:
            with page.case(f"decode {batch}{how}"):
                # Those that are prefilled first decode while the others' prompts are.
                tokens = sizes.tokens if device != "cpu" else sizes.tokens + batch
                page.row(*made.decode(batch, sizes.context, tokens, sampled=sampled, how=how))
    for length in sizes.prefills:
        with page.case(f"prefill {length}"):
            for row in made.prefill(length, sizes.chunk):
                page.row(*row)
    with page.case("profile"):
        _profile(page, made, sizes)
    del made
    Device.of(decoder.device).empty_cache()
    with page.case("attention by torch"):
        gathering = bench(sizes.context + 2 * sizes.tokens, sizes.batches[1], attention_backend="sdpa")
        page.table(*COLUMNS)
        page.row(*gathering.decode(sizes.batches[1], sizes.context, sizes.tokens, how=", sdpa"))
        del gathering
    with page.case("decode graphs"):
        graphs = bench(sizes.context + 2 * sizes.tokens, max(sizes.batches), decode_graphs=sizes.graphs)
        page.table(*COLUMNS)
        for batch in sizes.batches:
            with page.case(f"decode {batch} with graphs"):
                page.row(*graphs.decode(batch, sizes.context, sizes.tokens, how=", with graphs"))


def _cross(page: PartPage, path: Path, decoder: DecoderSide, sizes: Sizes, limits: DeviceLimits) -> None:
    """Decode steps of an encoder-decoder model over one encoder output, without and with graphs."""
    assert decoder.cross is not None
    rows = decoder.cross.max_rows if decoder.modality == "audio" else sizes.text_rows
    assert rows is not None
    dtype, width = str(decoder.dtype).removeprefix("torch."), decoder.cross.width
    plan = ItemPlan("a" * 64, "b" * 64, decoder.modality, rows, width, dtype, 0)
    data = torch.randn(rows, decoder.cross.width, dtype=decoder.dtype)
    output, store = EncoderOutput(plan, data), MemoryStore()
    store[plan.mm_hash] = output
    page.table(path.name, *COLUMNS[1:])
    for mode in ("off", sizes.graphs):
        engine = _engine(
            path, decoder, sizes, store=store, max_num_seqs=max(sizes.cross_batches), decode_graphs=mode
        )
        bench = EngineBench(engine, decoder_size(decoder), decoder.device.type, limits, sizes.repeats, output)
        for batch in sizes.cross_batches:
            with page.case(f"{path.name} decode {batch}, graphs {mode}"):
                page.row(*bench.decode(batch, 4, sizes.tokens + batch, how=f", graphs {mode}"))


def _engine(path: Path, decoder: DecoderSide, sizes: Sizes, **options: Any) -> Engine:
    return make_engine(
        path, decoder, kv_memory=sizes.kv_memory, max_num_batched_tokens=sizes.chunk, **options
    )


def _profile(page: PartPage, bench: EngineBench, sizes: Sizes) -> None:
    """Operators of decode steps by their own time on the device."""
    batch = sizes.batches[1]
    start_all(bench.engine, bench.requests(batch, sizes.context, sizes.tokens + batch))
    on_device = bench.device != "cpu"
    activities = [ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]
    with profile(activities=activities) as taken:
        for _ in range(_PROFILED):
            engine_step(bench.engine)
        synchronize(bench.device)

    def own(event: Any) -> float:
        return float(event.self_device_time_total if on_device else event.self_cpu_time_total)

    events = sorted(taken.key_averages(), key=own, reverse=True)
    total = sum(map(own, events)) / _PROFILED
    calls = sum(event.count for event in events if own(event)) / _PROFILED
    page.table(
        f"kernels of a decode of {batch}: {total / 1e3:.2f} ms, {calls:.0f} a step", "a step", "ms a step"
    )
    for event in events[:_SHOWN]:
        page.row(event.key[:80].replace("|", "\\|"), f"{event.count / _PROFILED:.1f}",
                 f"{own(event) / _PROFILED / 1e3:.3f}")  # fmt: skip
    while bench.engine.scheduler.num_running:
        engine_step(bench.engine)
