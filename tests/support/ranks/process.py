"""`python -m support.ranks.process …`: `triptych.base.ranks.process` with the tests' program."""

from __future__ import annotations

from triptych.base.ranks import process

process.PROGRAMS["test"] = "support.ranks.obedient"

if __name__ == "__main__":
    process.main()
