"""Systems side by side on the same loads, cell by cell; finished cells are skipped.

    python -m benchmarks baselines FILE.toml --results DIR [--only 'fixed.mix.*'] [--minutes N]
    python -m benchmarks baselines --results DIR [--results DIR …] [--write]

DIR gets a JSON file per cell; without FILE.toml the report is made of them: benchmarks/results/baselines.md.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from benchmarks.baselines.cell import CellFiles, chosen, plan_cells, read_folder
from benchmarks.baselines.cell_results import CellResults
from benchmarks.baselines.matrix import read_matrix
from benchmarks.baselines.measure import seconds_left
from benchmarks.baselines.runner import MatrixRun, run_command
from benchmarks.baselines.tables import report
from benchmarks.result_page import RESULTS, page_parser, publish
from triptych.base.progress import duration
from triptych_bench.goodput.report.display import Display

RESULT = RESULTS / "baselines.md"


def parser() -> argparse.ArgumentParser:
    result = page_parser(__doc__, RESULT)
    result.add_argument(
        "file", type=Path, nargs="?", help="TOML: systems, loads, cells; none: only the report"
    )
    result.add_argument("--results", type=Path, action="append", required=True, help="folder of the cells")
    result.add_argument("--only", action="append", default=[], help="pattern of cell names; again for more")
    result.add_argument("--minutes", type=float, default=0.0, help="stop before a cell that would not fit")
    result.add_argument("--retry-failed", action="store_true", help="measure failed cells again")
    result.add_argument("--list", action="store_true", help="only say which cells there are")
    return result


def main(arguments: list[str] | None = None) -> int:
    """0 when every cell that was asked for is done, 1 when some failed or are left, 2 for bad input."""
    options = parser().parse_args(arguments)
    return run_command(partial(_report if options.file is None else _measure, options))


def _report(options: argparse.Namespace, display: Display) -> bool:
    result = [CellResults(plan, cells) for folder in options.results for plan, cells in read_folder(folder)]
    text = report(result, "python -m benchmarks baselines --results DIR --write")
    publish(text, RESULT, write=options.write)
    return True


def _measure(options: argparse.Namespace, display: Display) -> bool:
    matrix = read_matrix(options.file)
    everything = plan_cells(matrix)
    cells = chosen({cell.name: cell for cell in everything}, options.only)
    files = CellFiles(options.results[-1], matrix.name)
    if options.list:
        for cell in cells:
            display.say(f"{cell.name:40} {'there' if files.path(cell).exists() else ''}".rstrip())
        left = seconds_left(cells, files.read(everything))
        display.say(f"{len(cells)} cells, about {duration(left)}")
        return True
    run = MatrixRun(matrix, cells, files, display, options.minutes, options.retry_failed)
    return run.run(everything)
