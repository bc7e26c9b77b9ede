"""Systems side by side on the same loads, cell by cell; finished cells are skipped.

    python -m benchmarks baselines FILE.toml --results DIR [--only 'fixed.mix.*'] [--minutes N]
    python -m benchmarks baselines --results DIR [--results DIR …] [--write]

DIR gets a JSON file per cell; without FILE.toml the report is made of them.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from benchmarks.baselines.cell import CellFiles, chosen, plan_cells, read_folder
from benchmarks.baselines.cell_results import CellResults
from benchmarks.baselines.matrix import read_matrix
from benchmarks.baselines.measure import format_duration, seconds_left
from benchmarks.baselines.runner import MatrixRun, Options
from benchmarks.baselines.tables import report
from benchmarks.result_page import RESULTS, page_parser, publish
from triptych.base.errors import ConfigError
from triptych.goodput.load.pictures import CONTENTS
from triptych.goodput.report.display import Display


def parser() -> argparse.ArgumentParser:
    found = page_parser(__doc__, RESULTS / "baselines.md")
    found.add_argument(
        "file", type=Path, nargs="?", help="TOML: systems, loads, cells; none: only the report"
    )
    found.add_argument("--results", type=Path, action="append", required=True, help="folder of the cells")
    found.add_argument("--repeats", type=int, default=0, help="of every cell; the file's by default")
    found.add_argument("--only", action="append", default=[], help="pattern of cell names; again for more")
    found.add_argument("--image-content", choices=sorted(CONTENTS), help="of all pictures, like photos")
    found.add_argument("--minutes", type=float, default=0.0, help="stop before a cell that would not fit")
    found.add_argument("--restart-each", action="store_true", help="a new server for every cell")
    found.add_argument("--retry-failed", action="store_true", help="measure failed cells again")
    found.add_argument("--list", action="store_true", help="only say which cells there are")
    found.add_argument("--page", default="baselines.md", help="the report's file in benchmarks/results")
    return found


def main(arguments: list[str] | None = None) -> int:
    """0 when every cell that was asked for is done, 1 when some failed or are left, 2 for bad input."""
    options = parser().parse_args(arguments)
    # Servers end with this process, by SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    display = Display(Console(soft_wrap=True))
    try:
        if options.file is None:
            found = [CellResults(plan, cells) for of in options.results for plan, cells in read_folder(of)]
            text = report(found, "python -m benchmarks baselines --results DIR --write")
            publish(text, RESULTS / options.page, write=options.write)
            return 0
        matrix = read_matrix(options.file)
        if content := options.image_content:
            name, about = f"{matrix.name}-{content}", f"{matrix.about}; pictures: {content}"
            matrix = replace(matrix, name=name, about=about, content=content)
        everything = plan_cells(matrix, options.repeats)
        cells = chosen(everything, options.only)
        files = CellFiles(options.results[-1], matrix.name)
        if options.list:
            for cell in cells:
                display.say(f"{cell.name:40} {'there' if files.path(cell).exists() else ''}".rstrip())
            display.say(
                f"{len(cells)} cells, about {format_duration(seconds_left(cells, files.read(everything)))}"
            )
            return 0
        run_options = Options(options.minutes, options.restart_each, options.retry_failed)
        return 0 if MatrixRun(matrix, cells, files, run_options, display).run(everything) else 1
    except ConfigError as error:
        display.warn(str(error))
        return 2
