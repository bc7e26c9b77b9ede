"""The report on the baselines, made of the cells that `python -m benchmarks baselines` has measured.

python -m benchmarks.baselines.report DIR [DIR …] [--write]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.baselines.cell import read_folder
from benchmarks.baselines.cell_results import CellResults
from benchmarks.baselines.tables import report
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.base.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """2 when a folder holds no cells."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folders", type=Path, nargs="+", help="what --results was")
    add_write_flag(found, RESULTS / "baselines.md")
    found.add_argument("--to", type=Path, default=RESULTS, help="folder to write to: benchmarks/results")
    options = found.parse_args(arguments)
    try:
        matrices = [
            CellResults(plan, cells) for folder in options.folders for plan, cells in read_folder(folder)
        ]
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    text = report(matrices, "python -m benchmarks.baselines.report DIR --write")
    publish(text, options.to / "baselines.md", write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
