"""`python -m benchmarks` says where to begin, then shows the targets and how far they are reached.

`python -m benchmarks list` names the benchmarks, `python -m benchmarks NAME [ARGUMENTS]` runs one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import targets
from benchmarks.programs import listing, run
from triptych.base.progress import lines_on_stderr

_FOLDER = Path(__file__).parent
_BEGIN = """\
Begin with the goodput of one encoder and one PD worker, started for it:

    triptych bench goodput --launch 1E1PD --workload mix --search

A server that runs already: --url http://127.0.0.1:8000. What the figures mean: docs/goodput.md.
A cell of each page, here: python -m benchmarks reproduce. All benchmarks: python -m benchmarks list.
Targets, and the figures last committed for them:

"""


def main(arguments: list[str]) -> int:
    if not arguments:
        sys.stdout.write(_BEGIN + targets.table(targets.read()))
        return 0
    if arguments[0] == "list":
        sys.stdout.write(listing(_FOLDER))
        return 0
    with lines_on_stderr():
        return run(_FOLDER, arguments, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
