"""The programs that ranks run, by name; each is a module with a function `main(rank)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from triptych.base.ranks.rank import Rank

#: The only modules that a rank's process imports by name.
PROGRAMS = {
    "encoder": "triptych.encoder_worker.ranks.program",
    "pd": "triptych.pd_worker.ranks.program",
}


def program(name: str) -> Callable[[Rank], None]:
    """The program of this name; KeyError for any other."""
    main: Callable[[Rank], None] = importlib.import_module(PROGRAMS[name]).main
    return main
