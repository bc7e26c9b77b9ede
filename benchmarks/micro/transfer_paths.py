"""Embeddings from the tower's output to a checked tensor in a PD worker's process: time and CPU by path."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.micro.transfer_side import PATHS, SIZES
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.apps.launch.embedded_store import EmbeddedStore

RESULT = RESULTS / "transfer_paths.md"
ROOT = Path(__file__).resolve().parents[2]
_SIDE = Path(__file__).with_name("transfer_side.py")
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """All turns of one size by one path: milliseconds, and those of CPU."""

    milliseconds: list[float]
    cpu: list[float]


#: The transfers of one checkout, by (size, path).
Transfers = dict[tuple[str, str], Transfer]


@contextmanager
def _side(url: str, checkout: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, str(_SIDE), url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(_PATIENCE)


def _turn(process: subprocess.Popen[str], number: int) -> list[tuple[float, float]]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise RuntimeError("a side of the comparison has ended")
    return [tuple(pair) for pair in json.loads(line)]


def measure(url: str, repeats: int, before: Path | None) -> list[Transfers]:
    """The transfers of this checkout, and of the one `before`, by turns; the save goes on beside them."""
    checkouts = [ROOT] if before is None else [ROOT, before]
    keys = [(size, path) for size in SIZES for path in PATHS]
    measured: list[Transfers] = [{key: Transfer([], []) for key in keys} for _ in checkouts]
    with ExitStack() as stack:
        sides = [stack.enter_context(_side(url, checkout)) for checkout in checkouts]
        for number in range(repeats + 1):
            pairs = list(zip(measured, sides, strict=True))
            for transfers, process in pairs[:: (-1) ** number]:  # who begins alternates, too
                turn = _turn(process, number)
                if not number:  # connections are made, and memory is touched
                    continue
                for key, (milliseconds, cpu) in zip(keys, turn, strict=True):
                    transfers[key].milliseconds.append(milliseconds)
                    transfers[key].cpu.append(cpu)
    return measured


def _ratio(before: Sequence[float], now: Sequence[float]) -> str:
    """The median over the turns: neighbours on the machine meet both sides of a turn."""
    return f"{statistics.median(b / n for b, n in zip(before, now, strict=True)):.2f}"


def rows(measured: Sequence[Transfers]) -> str:
    """The lines of a table: median and best time, CPU time, and the ratios before / now of both."""
    now, before = measured[0], measured[-1] if len(measured) > 1 else None
    lines = []
    for (size, path), transfer in now.items():
        times = transfer.milliseconds
        ratios = ["", ""]
        if before is not None:
            other = before[size, path]
            ratios = [_ratio(other.milliseconds, times), _ratio(other.cpu, transfer.cpu)]
        cpu = statistics.median(transfer.cpu)
        cells = [size, path, f"{statistics.median(times):.1f} ({min(times):.1f})", f"{cpu:.1f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--before", type=Path, help="another checkout, measured by turns with this one")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 30) as server:
        measured = measure(server.url, options.repeats, options.before)
    before = " --before CHECKOUT" if options.before else ""
    command = f"python -m benchmarks transfer_paths --repeats {options.repeats}{before}"
    publish(fill("transfer_paths", command=command, paths=rows(measured)), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
