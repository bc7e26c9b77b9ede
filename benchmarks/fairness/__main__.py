"""How long one key's small requests take while another key floods the cluster, and on an older commit.

For each flood of `benchmarks/fairness/floods.py`: B alone, B beside one honest neighbour that asks the same,
B beside A's flood, 200 requests each time: of sixty the 99th percentile is the worst one. Each flood has a
cluster of its own on loopback: the demo model, one encoder worker, one PD worker.

    python -m benchmarks fairness [--before FOLDER] [--seconds 14] [--only NAME,…] [--write]

FOLDER is a checkout of the older commit; without it the page's rows of that commit stay. With `--only` the
page's rows of other floods stay too. All floods of one commit take about twenty minutes. A's clients stand
behind everybody for the CPU, so that what B waits for is the cluster.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fairness.attacker import beside, flood_process, neighbour_process
from benchmarks.fairness.cluster import HERE, A, B, TwoKeys, two_keys
from benchmarks.fairness.flood import Flood
from benchmarks.fairness.floods import FLOODS
from benchmarks.fairness.neighbour import Figures, ask_for
from benchmarks.result_page import RESULTS, fill, page_parser, publish, table

RESULT = RESULTS / "fairness.md"
PATIENCE = 10.0
#: B's requests of one measurement, unless its time is over before.
REQUESTS = 200
#: The commit before anything took turns between tenants, and how its rows were measured that the page has.
BEFORE = "997f3c58"
_KEPT = "whose rows are of 2026-11-28, 5 s each, on an Intel Xeon of 2 cores"
#: Seconds in which a proxy has read a key file that has changed.
_KEYS_SECONDS = 2.5


@dataclass(frozen=True)
class Row:
    """One flood at one commit."""

    flood: Flood
    calm: Figures
    beside: Figures | None
    during: Figures
    ended: dict[str, int]

    @property
    def bound(self) -> float:
        """What B's P99 may be."""
        if self.beside is not None:
            return 3 * self.beside.p99
        return 2 * self.calm.p99 + 0.05

    @property
    def held(self) -> bool:
        return not self.during.refused and self.during.p99 <= self.bound


def measure(cluster: TwoKeys, flood: Flood, seconds: float) -> Row:
    """One flood against a cluster at rest."""
    door, own = cluster.door, cluster.keys[B]

    def ask(length: float, least: int = 10) -> Figures:
        return asyncio.run(ask_for(door, own, flood.asks, length, PATIENCE, least, REQUESTS))

    ask(0.5)  # warm
    calm, neighbour = ask(seconds), None
    if flood.kind in ("engine", "decoder"):
        with beside(neighbour_process, flood.asks, door, cluster.keys[A]) as honest:
            honest.begin()
            neighbour = ask(seconds)
            honest.end()
    if flood.keys > 2:
        cluster.add_keys(flood.keys - 2)
        ask(_KEYS_SECONDS)
    with beside(flood_process, flood.name, door, cluster.keys[A], 1.0) as attack:
        attack.begin()
        time.sleep(0.2)
        during = ask(seconds, 2)
        return Row(flood, calm, neighbour, during, attack.end())


@contextmanager
def _shown(tree: Path, name: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    sys.stderr.write(f"{tree.name} {name}: {time.monotonic() - begun:.0f} s\n")


def measure_all(tree: Path, floods: list[Flood], seconds: float) -> list[Row]:
    """Each flood against a cluster of its own. One that cannot be measured has no row; the others go on."""
    rows = []
    for flood in floods:
        try:
            with _shown(tree, flood.name), two_keys(tree) as cluster:
                rows.append(measure(cluster, flood, seconds))
        except (OSError, RuntimeError) as error:
            sys.stderr.write(f"{flood.name}: not measured: {error}\n")
            continue
        sys.stderr.write(" | ".join(_cells(rows[-1], "")) + "\n")
    return rows


def _milliseconds(seconds: float, patience: float = PATIENCE) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds * 1000:,.0f}" if math.isfinite(seconds) else f"none in {patience:g} s"


def _cells(row: Row, commit: str) -> tuple[str, ...]:
    during, outcomes = row.during, ", ".join(f"{count} x {name}" for name, count in row.ended.items())
    return (
        f"`{row.flood.name}`",
        row.flood.kind,
        commit,
        _milliseconds(row.calm.p99),
        "" if row.beside is None else _milliseconds(row.beside.p99),
        _milliseconds(during.p50),
        _milliseconds(during.p99),
        f"{len(during.refused)} of {during.asked}",
        _milliseconds(row.bound),
        "yes" if row.held else "no",
        outcomes or "none has ended",
    )


_HEAD = (
    "flood",
    "takes",
    "commit",
    "B alone",
    "B beside one",
    "B P50",
    "B P99",
    "refused",
    "bound",
    "held",
    "A's",
)
#: Where a row's commit stands, and whether its bound was kept.
_COMMIT, _HELD = _HEAD.index("commit"), _HEAD.index("held")


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _rows(page: str) -> Iterator[tuple[str, ...]]:
    """The rows of a page of this kind, but not its head."""
    for line in page.splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if len(cells) == len(_HEAD) and cells[0].startswith("`"):
            yield cells


def kept_rows(page: str, commit: str) -> list[tuple[str, ...]]:
    """The rows of the page that were measured at the commit, the first one of each flood."""
    rows: dict[str, tuple[str, ...]] = {}
    for cells in _rows(page):
        if cells[_COMMIT] == commit:
            rows.setdefault(cells[0], cells)
    return list(rows.values())


def page_rows(page: str, measured: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The measured rows, and those of the page's other floods, in the order of the table of floods."""
    anew = {cells[0] for cells in measured}
    rows = [*measured, *(cells for cells in _rows(page) if cells[0] not in anew)]
    order = [f"`{name}`" for name in FLOODS]
    return sorted((cells for cells in rows if cells[0] in order), key=lambda cells: order.index(cells[0]))


def main() -> None:
    parser = page_parser(__doc__, RESULT, seconds=14.0)
    parser.add_argument("--before", type=Path, default=None, help="a checkout of an older commit")
    parser.add_argument("--only", default="", help="floods, separated by commas; default: all")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(FLOODS)
    floods = [FLOODS[name] for name in names]
    command = f"python -m benchmarks fairness --seconds {options.seconds:g}"
    page = RESULT.read_text(encoding="utf-8")
    if options.before is None:
        commit, earlier, how = BEFORE, kept_rows(page, BEFORE), _KEPT
    else:
        tree = options.before.resolve()
        commit = _commit(tree)
        earlier = [_cells(row, commit) for row in measure_all(tree, floods, options.seconds)]
        how, command = "measured in this run", f"{command} --before FOLDER"
    measured = measure_all(HERE, floods, options.seconds)
    own, now = {f"`{name}`" for name in names}, _commit(HERE)
    rows = [cells for cells in earlier if cells[0] in own] + [_cells(row, now) for row in measured]
    if options.only:
        rows = page_rows(page, rows)
    last = [cells for cells in rows if cells[_COMMIT] != commit]
    text = fill(
        "fairness",
        command=command,
        seconds=f"{options.seconds:g}",
        patience=f"{PATIENCE:g}",
        requests=REQUESTS,
        floods="\n".join(
            f"- `{flood.name}`: {flood.sends}; B asks for a {flood.asks}." for flood in FLOODS.values()
        ),
        rows="\n".join(table(_HEAD, rows, (0, 1, 2, 7, 9, 10))),
        held=sum(cells[_HELD] == "yes" for cells in last),
        count=len(FLOODS),
        missed=", ".join(cells[0] for cells in last if cells[_HELD] == "no") or "none",
        unmeasured=len(FLOODS) - len(last),
        earlier=f"{commit}, {how}" if earlier else "none",
    )
    publish(text, RESULT, write=options.write)
