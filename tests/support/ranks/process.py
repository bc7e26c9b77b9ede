"""`python -m support.ranks.process …`: `triptych.ranks.process` with the tests' program among the others."""

from __future__ import annotations

from triptych.ranks import process, program

program.PROGRAMS["test"] = "support.ranks.obedient"

if __name__ == "__main__":
    process.main()
