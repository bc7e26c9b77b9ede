"""docs/metrics.md names every metric, as the processes declare them.

TRIPTYCH_WRITE_METRICS=1 writes the page's table anew in place of comparing it.
"""

from __future__ import annotations

import os
from pathlib import Path

from support.monitoring.metric_table import table

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "\n<!-- metrics: end -->"


def test_the_table_is_that_of_the_registries():
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("TRIPTYCH_WRITE_METRICS"):
        PAGE.write_text(text[:begin] + table() + text[end:])
        return
    assert text[begin:end] == table(), "write it anew with TRIPTYCH_WRITE_METRICS=1"
