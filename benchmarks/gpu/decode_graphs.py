"""Decode with CUDA graphs against decode without, interleaved: start-up, memory, and time of a step by batch.

    python -m benchmarks.gpu.decode_graphs MODEL [--dtype bfloat16] [--prompt 1024] [--tokens 128] [--write]
    python -m benchmarks.gpu.decode_graphs MODEL --device cpu --mode static --dtype float32 --prompt 64
        --tokens 8

One engine per mode, over the same weights. Start: seconds to build the engine, with its captures. Memory:
what building it has taken of the device. Step: milliseconds of a decode step, the median over rounds in turn.
On a CPU `off` attends in runs of blocks and `static` gathers them: no gain, but a check.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.gpu.device_limits import (
    DecoderSize,
    DeviceLimits,
    command_of,
    decoder_size,
    gpu_parser,
    limits_of,
    page,
    table,
)
from benchmarks.gpu.engine import BATCHES, prompts_of
from benchmarks.micro.engine_decode import engine_round, make_engine, make_requests, synchronize
from benchmarks.result_page import RESULTS, publish
from triptych.base.config import GIB, MIB
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.engine import Engine

RESULT = RESULTS / "gpu_decode_graphs.md"


def memory_in_use(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_reserved(device)


def build(arguments: argparse.Namespace) -> tuple[dict[str, Engine], DecoderSize, list[str]]:
    """An engine per mode, their decoder's size, and the rows of what building each took."""
    device = arguments.device
    decoder = load_decoder(
        arguments.model, device=torch.device(device), dtype=getattr(torch, arguments.dtype),
        attn_implementation=ATTENTION_NAME,
    )  # fmt: skip
    engines, rows = {}, []
    for mode in ("off", arguments.mode):
        before, start = memory_in_use(device), time.perf_counter()
        engines[mode] = make_engine(
            arguments.model, device, decoder.dtype, decoder, decode_graphs=mode,
            max_model_len=arguments.prompt + arguments.tokens + 1,
            kv_memory=arguments.kv_gib * GIB if device != "cpu" else 256 * MIB,
            max_num_batched_tokens=max(4096, arguments.prompt), max_num_seqs=max(BATCHES),
        )  # fmt: skip
        synchronize(device)
        seconds, taken = time.perf_counter() - start, memory_in_use(device) - before
        rows.append(f"| engine with {mode} | {seconds:.2f} s | {taken / MIB:.0f} MiB, KV cache included | |")
    return engines, decoder_size(decoder), rows


def step_rows(
    engines: dict[str, Engine], size: DecoderSize, arguments: argparse.Namespace, limits: DeviceLimits
) -> list[str]:
    rows = []
    for batch in BATCHES:
        times: dict[str, list[float]] = {mode: [] for mode in engines}
        for _ in range(arguments.repeats + 1):
            for mode, engine in engines.items():
                prompts = prompts_of(batch, arguments.prompt, engine.runner.vocab_size)
                requests = make_requests(engine, prompts, arguments.tokens, engine.runner.position_rows)
                speed = engine_round(engine, requests, arguments.device).tokens_per_second
                times[mode].append(batch / speed * 1e3)
        eager, graph = (statistics.median(values[1:]) for values in times.values())
        # The steps' mean context.
        share = size.decode(batch, arguments.prompt + arguments.tokens / 2).ratio(graph / 1e3, limits)
        rows.append(
            f"| step, batch {batch} | {eager:.2f} ms without, {graph:.2f} ms with | {graph / eager:.2f} "
            f"| {share} |"
        )
    return rows


def report(rows: list[str], arguments: argparse.Namespace, limits: DeviceLimits) -> str:
    command = command_of("decode_graphs", arguments, "mode", "prompt", "tokens", "repeats")
    head = table("what", "time", "memory or ratio", "share of the limit with")
    body = [limits.said(), "", *head, *rows]
    return page("Decode graphs", command, arguments.device, "medians of interleaved rounds", body)


def main(argv: list[str] | None = None) -> None:
    parser = gpu_parser(__doc__, RESULT)
    parser.add_argument("--mode", default="cuda", choices=("cuda", "static"))
    arguments = parser.parse_args(argv)
    limits = limits_of(arguments)
    engines, size, rows = build(arguments)
    text = report([*rows, *step_rows(engines, size, arguments, limits)], arguments, limits)
    publish(text, RESULT, write=arguments.write)


if __name__ == "__main__":
    main()
