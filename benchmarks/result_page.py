"""A benchmark's page in `benchmarks/results`: always printed, and kept with `--write`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
TEMPLATES = Path(__file__).parent / "pages"


def add_write_flag(parser: argparse.ArgumentParser, page: Path) -> None:
    """`--write`, as `options.write` of `publish`."""
    parser.add_argument("--write", action="store_true", help=f"write {page.name}")


def fill(template: str, **fields: object) -> str:
    """The page of a template: its text with these fields in it."""
    return (TEMPLATES / f"{template}.md").read_text(encoding="utf-8").format(**fields)


def publish(text: str, page: Path, *, write: bool) -> None:
    """Prints `text`; puts it in the place of `page` where `write` is set."""
    sys.stdout.write(text)
    if write:
        page.write_text(text, encoding="utf-8")
