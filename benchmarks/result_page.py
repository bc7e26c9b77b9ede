"""A benchmark's page in `benchmarks/results`: always printed, and kept with `--write`; and its tables."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from triptych.base.machine.resources import cpu_name
from triptych_bench.goodput.report.machine import commit

RESULTS = Path(__file__).parent / "results"
TEMPLATES = Path(__file__).parent / "pages"


def page_parser(doc: str | None, page: Path, **numbers: float) -> argparse.ArgumentParser:
    """A command line with `--write`, and an option for each of the `numbers`, which are the defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--write", action="store_true", help=f"write {page.name}")
    return parser


def fill(template: str, **fields: object) -> str:
    """The page of a template: its text with these fields in it, and with where and when it was made."""
    facts: dict[str, object] = {
        "date": datetime.date.today(),
        "commit": commit(),
        "chip": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
    }
    return (TEMPLATES / f"{template}.md").read_text(encoding="utf-8").format(**facts | fields)


def publish(text: str, page: Path, *, write: bool) -> None:
    """Prints `text`; puts it in the place of `page` where `write` is set."""
    sys.stdout.write(text)
    if write:
        page.write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[int] = (0,)) -> list[str]:
    """A Markdown table; the columns in `texts` are text, the rest numbers."""
    rules = ("---" if index in texts else "---:" for index in range(len(head)))
    return [f"| {' | '.join(cells)} |" for cells in (head, rules, *rows)]


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Median, and the range where there is one."""
    return ranged(statistics.median(values), min(values), max(values)) if values else "–"


def ranged(middle: float, low: float, high: float) -> str:
    """A figure, and the range of those that it is of."""
    words = [number(value) for value in (middle, low, high)]
    return words[0] if words[1] == words[2] else "{} ({} – {})".format(*words)
