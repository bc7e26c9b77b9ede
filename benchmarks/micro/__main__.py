"""One part alone: hot paths (relay, registry, transfers), attention beside reading, starts, shared prefixes.

python -m benchmarks micro                     # their names
python -m benchmarks micro NAME [ARGUMENTS]
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.programs import listing, run


def main() -> int:
    folder, arguments = Path(__file__).parent, sys.argv[1:]
    if not arguments:
        sys.stdout.write(listing(folder))
        return 0
    return run(folder, arguments, "python -m benchmarks micro")
