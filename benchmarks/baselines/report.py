"""The report on the baselines, made of the cells that `python -m benchmarks baselines` has measured.

    python -m benchmarks.baselines.report DIR [DIR …] [--write]

Without --write it goes to standard output; with it, to baselines.md in benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.baselines.cell import read_folder
from benchmarks.baselines.cell_results import CellResults
from benchmarks.baselines.tables import report
from benchmarks.result_page import RESULTS
from triptych.base.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """2 when a folder holds no cells."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folders", type=Path, nargs="+", help="what --results was")
    found.add_argument("--write", action="store_true", help="write baselines.md")
    found.add_argument("--to", type=Path, default=RESULTS, help="folder to write to: benchmarks/results")
    options = found.parse_args(arguments)
    try:
        matrices = [
            CellResults(plan, cells) for folder in options.folders for plan, cells in read_folder(folder)
        ]
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not options.write:
        sys.stdout.write(report(matrices))
        return 0
    target = options.to / "baselines.md"
    target.write_text(report(matrices, "python -m benchmarks.baselines.report DIR --write"))
    sys.stdout.write(f"wrote {target}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
