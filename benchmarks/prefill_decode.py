"""Prefill and decode apart beside workers that do both, on the same cores: three kinds of requests at once.

    python -m benchmarks prefill_decode [--rounds 3] [--seconds 25] [--thresholds 0 256 1024] [--write]
    python -m benchmarks prefill_decode --vllm PEER [--rounds 3] [--seconds 25] [--thresholds 256]
      [--prompts 0.5]

Short texts, long prompts and pictures come at their own rates. Each system's cluster is alone while it is
measured, and they take turns; a figure is the median of the rounds, a ratio of the rounds' ratios.

PEER is the kit of `against_peer`: two of its vLLM are then the engines of the PD workers, its `tiny` the
checkpoint, KV moves by NIXL, and the table is printed alone. `--prompts`: a factor for the rates of long
prompts and pictures, which one core may not keep up with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.result_page import RESULTS, fill, number, publish, table
from benchmarks.vllm_pair import serving, tokens_read
from triptych.base.config import WorkerCounts
from triptych_bench.goodput.launch import launched

PAGE = RESULTS / "prefill_decode.md"
BOTH = "2 x both"
#: Workers that register after the cluster is ready: one of the two PD workers may.
_REST_SECONDS, _PATIENCE = 5.0, 300.0
#: Seconds before the figures; NIXL's first handshakes take some.
_WARM_UP, _VLLM_WARM_UP = 4.0, 12.0


@dataclass(frozen=True)
class Kind:
    """Requests of one kind. `rate` in requests per second."""

    name: str
    rate: float
    text_tokens: int
    images: int = 0
    output_tokens: int = 64

    @property
    def words(self) -> list[str]:
        """The flags of `triptych bench goodput`."""
        return [
            *("--rate", str(self.rate), "--text-tokens", str(self.text_tokens)),
            *("--images", str(self.images), "--image-size", "320x320"),
            *("--output-tokens", str(self.output_tokens)),
        ]


KINDS = (Kind("text", 3.0, 32), Kind("long prompts", 0.8, 1700), Kind("three pictures", 0.8, 32, 3))
#: What a window says of a kind.
FIGURES = {
    "median TTFT": "median_ttft_ms",
    "P99 TTFT": "p99_ttft_ms",
    "median TPOT": "median_tpot_ms",
    "P99 TPOT": "p99_tpot_ms",
}
#: Limits of a good request, ms to the first token and for each further one. Goodput is all kinds' together.
LIMITS = ((1000, 50), (500, 5), (500, 10), (250, 5), (250, 10))
#: Figures of one cluster by kind and name.
Figures = Mapping[tuple[str, str], float]


def systems(thresholds: Sequence[int]) -> dict[str, tuple[WorkerCounts, list[str]]]:
    """The shape and the further flags of each system, by name; the first is what the others stand beside."""
    roles = ["--prefill-workers", "1", "--decode-workers", "1", "--prefill-threshold"]
    return {
        BOTH: (WorkerCounts(encoders=1, pd_workers=2), []),
        # With roles, `serve` takes them in the place of its one PD worker.
        **{
            f"1 P + 1 D from {each} tokens": (WorkerCounts(encoders=1, pd_workers=1), [*roles, str(each)])
            for each in thresholds
        },
    }


def native(shape: WorkerCounts, words: Sequence[str], model: str, seconds: float, seed: int) -> Figures:
    """All kinds at once, at a cluster of their own."""
    with launched(shape, model, words) as cluster:
        return measure(cluster.url, seconds, seed)


def before_vllm(
    peer: Path, threshold: int | None, seconds: float, kinds: Sequence[Kind], seed: int
) -> Figures:
    """The same with two vLLM as engines."""

    async def measured() -> Figures:
        async with serving(peer, threshold) as (url, metrics):
            found = await asyncio.to_thread(measure, url, seconds, seed, _VLLM_WARM_UP, kinds)
            with urllib.request.urlopen(metrics, timeout=30) as reply:
                read = tokens_read(reply.read().decode())
            return {**found, ("all: prompt tokens by NIXL", "with the warm-up"): read}

    return asyncio.run(measured())


def clusters(options: argparse.Namespace) -> dict[str, Callable[[int], Figures]]:
    """What measures each system, given a seed."""
    named = systems(options.thresholds)
    if options.vllm is None:
        return {name: partial(native, *of, options.model, options.seconds) for name, of in named.items()}
    thresholds = (None, *options.thresholds)
    kinds = [kind if kind is KINDS[0] else replace(kind, rate=kind.rate * options.prompts) for kind in KINDS]
    return {
        name: partial(before_vllm, options.vllm, threshold, options.seconds, kinds)
        for name, threshold in zip(named, thresholds, strict=True)
    }


def measure(
    url: str, seconds: float, seed: int, warm_up: float = _WARM_UP, kinds: Sequence[Kind] = KINDS
) -> Figures:
    """All kinds at once, at the cluster that answers there."""
    with tempfile.TemporaryDirectory() as folder:
        time.sleep(_REST_SECONDS)
        outputs = {kind: Path(folder) / str(place) for place, kind in enumerate(kinds)}
        loads = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "triptych.apps.cli", "bench", "goodput", "--url", url),
                    *(*kind.words, "--seconds", str(seconds), "--warm-up", str(warm_up), "--seed", str(seed)),
                    *("--plots", "none", "--output", str(output)),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for kind, output in outputs.items()
        ]
        try:
            ended = [load.wait(_PATIENCE) for load in loads]
        finally:
            for load in loads:
                load.kill()
        assert not any(ended), f"the loads ended with {ended}"
        found: dict[tuple[str, str], float] = {}
        good = dict.fromkeys(LIMITS, 0)
        for kind, output in outputs.items():
            [window] = json.loads(output.with_suffix(".json").read_text())["windows"]
            assert not window["failed"], f"{window['failed']} of the {kind.name} failed"
            found |= {(kind.name, name): float(window[field]) for name, field in FIGURES.items()}
            for limits in LIMITS:
                good[limits] += good_requests(window, *limits)
    for (first, each), count in good.items():
        found["all: goodput, requests/s", f"TTFT {first}, TPOT {each} ms"] = count / seconds
    return found


def good_requests(window: Mapping[str, Sequence[float]], ttft_ms: float, tpot_ms: float) -> int:
    """Requests of a window of which no token came too late."""
    of = zip(window["ttfts"], window["latencies"], window["output_lens"], strict=True)
    return sum(
        0 < 1000 * first <= ttft_ms and 1000 * (whole - first) <= tpot_ms * max(1, tokens - 1)
        for first, whole, tokens in of
    )


def rows(taken: Mapping[str, Sequence[Figures]]) -> list[list[str]]:
    """A row per kind and figure: the median of each system in ms, with its ratio to the first one's."""
    (_, beside), *_ = taken.items()
    lines = []
    for key in beside[0]:
        cells = []
        for system, rounds in taken.items():
            middle = number(statistics.median(each[key] for each in rounds))
            pairs = zip(rounds, beside, strict=True)
            ratios = [own[key] / other[key] for own, other in pairs if other[key]]
            ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
            cells.append(middle if system == BOTH else f"{middle}: {ratio}")
        lines.append([*key, *cells])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--thresholds", type=int, nargs="+", default=[0, 256, 1024])
    parser.add_argument("--model", default="", help="a checkpoint folder; default: the demo model")
    parser.add_argument("--vllm", type=Path, metavar="PEER", help="the kit of vLLM; default: our own engine")
    parser.add_argument("--prompts", type=float, default=1.0, help="with --vllm: factor for their rates")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    if options.vllm is not None and (options.write or options.model):
        parser.error(f"--vllm has a model of its own, and {PAGE.name} gets its table by hand")
    if options.vllm is None and options.prompts != 1:
        parser.error("--prompts is for --vllm")
    measured = clusters(options)
    taken: dict[str, list[Figures]] = {name: [] for name in measured}
    for turn in range(options.rounds):
        for name in list(measured)[:: 1 if turn % 2 else -1]:
            taken[name].append(measured[name](turn))
            # All of it: a run that is ended early has measured nevertheless.
            figures = {" ".join(key): value for key, value in taken[name][-1].items()}
            sys.stderr.write(f"round {turn + 1}: {name}: {json.dumps(figures)}\n")
    lines = "\n".join(table(["requests", "ms", *taken], rows(taken), texts=(0, 1)))
    if options.vllm is not None:
        sys.stdout.write(f"{lines}\n")
        return
    loads = "; ".join(f"{kind.name} {kind.rate:g}/s" for kind in KINDS)
    page = fill(
        "prefill_decode",
        rounds=options.rounds,
        seconds=f"{options.seconds:g}",
        thresholds=" ".join(map(str, options.thresholds)),
        loads=loads,
        model=Path(options.model).name or "the demo model",
        table=lines,
    )
    publish(page, PAGE, write=options.write)


if __name__ == "__main__":
    main()
