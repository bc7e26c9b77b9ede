"""One cell of each published page that needs nothing but the checkout, beside the published figure.

    python -m benchmarks reproduce [--minutes 10]

Cells run in order while there is time; pages that need more are listed with what they need. Figures of
another chip, or of a machine with other work, differ: compare ratios within a page.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.result_page import RESULTS

_ROOT = Path(__file__).parents[1]
_BENCHMARKS = ("-m", "benchmarks")
_MICRO = (*_BENCHMARKS, "micro")
_HOT_PATHS = (*_MICRO, "hot_paths")


@dataclass(frozen=True)
class Cell:
    """A short run of a page's program, about `seconds` long, and the rows of its tables that are shown.

    Rows are named by the cells that they begin with.
    """

    page: str
    arguments: tuple[str, ...]
    rows: tuple[str, ...]
    seconds: int


CELLS = (
    Cell(
        "proxy_relay.md",
        (*_HOT_PATHS, "proxy_relay", "--streams", "8", "--tokens", "1000", "--rounds", "3"),
        (
            "| tokens per second of the proxy's CPU time (one core), median |",
            "| proxy over receive alone, median of the rounds |",
            "| whole text requests per second of the proxy's CPU time |",
        ),
        60,
    ),
    Cell(
        "transfer_paths.md",
        (*_HOT_PATHS, "transfer_paths", "--repeats", "6"),
        ("| 1080p, 66.8 MB | store |", "| 1080p, 66.8 MB | peer |", "| 1080p, 66.8 MB | shm |"),
        60,
    ),
    Cell(
        "attention_reading.md",
        (
            *(*_MICRO, "attention_reading", "--batch", "16", "--context", "480", "--heads", "8"),
            *("--groups", "2", "--dim", "128", "--layers", "14", "--threads", "2", "--rounds", "5"),
        ),
        ("| float32 | reading |", "| float32 | AVX-512 |"),
        60,
    ),
    Cell(
        "fairness.md",
        (*_BENCHMARKS, "fairness", "--only", "wrong-bodies", "--seconds", "5"),
        ("| `wrong-bodies` | loop |",),
        60,
    ),
    Cell(
        "registry_load.md",
        (*_HOT_PATHS, "registry_load", "--repeats", "1"),
        ("| look at changed workers: 100 |", "| look at workers that are as they were: 100 |", "| beat |"),
        60,
    ),
    Cell(
        "prefill_decode.md",
        (*_BENCHMARKS, "prefill_decode", "--rounds", "1", "--seconds", "10", "--thresholds", "256"),
        ("| text | median TTFT |", "| text | P99 TPOT |", "| long prompts | P99 TPOT |"),
        75,
    ),
)
#: What the other pages need.
NEEDS = {
    "against_peer.md": "vLLM's CPU build in a folder of its own (PEER), and quiet cores for an hour",
    "against_peer_amx.md": "the same on a CPU with AMX",
    "against_peer_avx512.md": "the same on a CPU with AVX-512",
    "audio_demo.md": "a served demo: the two commands on the page, 10 minutes",
    "autoscale.md": "its command: simulated, half an hour",
    "baselines.md": "quiet cores for hours",
    "cpu_engine.md": "a checkpoint: python -m benchmarks.gpu.engine MODEL --device cpu",
    "demo_model.md": "a served demo: the two commands on the page, 5 minutes",
    "earlier.md": "commits of before",
    "fuzz.md": "make test-slow",
    "kills.md": "vLLM's CPU build: python -m benchmarks kills",
    "load_tools.md": "make load-tools: other people's tools",
    "one_tenant.md": "a checkout of commit 997f3c58 with an environment",
    "overload.md": "its command, a slow test",
    "peer_cases.md": "vLLM's CPU build, as against_peer",
    "published_epd.md": "the program of commit f21588e1",
    "soak.md": "an hour",
    "tests.md": "make test-slow: hours",
    "vllm_paths.md": "vLLM's CPU build: python -m benchmarks micro vllm_paths",
    "vllm_fleet.md": "the program of commit f21588e1, and vLLM",
    "when_to_disaggregate.md": "the program of commit f21588e1; a cell: docs/when-to-disaggregate.md",
}


def shown(text: str, rows: tuple[str, ...]) -> list[str]:
    """The last row of the text for each name, after its table's head; a name without a row is left out."""
    lines = text.splitlines()
    out: list[str] = []
    for name in rows:
        at = max((index for index, line in enumerate(lines) if line.startswith(name)), default=None)
        if at is None:
            continue
        head = at
        while lines[head - 1].startswith("|"):
            head -= 1
        out += [line for line in (lines[head], lines[head + 1]) if line not in out]
        out.append(lines[at])
    return out


def _run(cell: Cell, seconds: float) -> str:
    """What the cell's program prints, or why there is nothing."""
    command = [sys.executable, *cell.arguments]
    try:
        ended = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {seconds:.0f} s: give more --minutes, or run it on an idle machine"
    own = shown(ended.stdout, cell.rows)
    return "\n".join(own or [f"failed with status {ended.returncode}: {ended.stderr.strip()[-400:]}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    end = time.monotonic() + 60 * parser.parse_args().minutes
    failed = 0
    for cell in CELLS:
        left = end - time.monotonic()
        print(f"\n{cell.page}: python {' '.join(cell.arguments)}", flush=True)
        if left < cell.seconds:
            print(f"left out: it takes about {cell.seconds} s, and {max(0, left):.0f} s are left")
            continue
        print("\n".join(["published:", *shown((RESULTS / cell.page).read_text("utf-8"), cell.rows), "here:"]))
        text = _run(cell, left)
        failed += not text.startswith("|")
        print(text, flush=True)
    print("\nNot run:")
    for page, need in NEEDS.items():
        print(f"  {page}: {need}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
