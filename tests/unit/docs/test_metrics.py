"""docs/metrics.md names every metric, as the processes declare them.

TRIPTYCH_WRITE_METRICS=1 writes the page's table anew in place of comparing it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.monitoring.metric_table import DocumentedMetric, documented, table

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "\n<!-- metrics: end -->"
#: vLLM's names, and a histogram of vLLM's with the ending of a counter.
ODD_NAMES = ("vllm:",)


def test_the_table_is_that_of_the_registries():
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("TRIPTYCH_WRITE_METRICS"):
        PAGE.write_text(text[:begin] + table() + text[end:])
        return
    assert text[begin:end] == table(), "write it anew with TRIPTYCH_WRITE_METRICS=1"


@pytest.mark.parametrize("metric", documented(), ids=lambda metric: metric.name)
def test_a_metric_says_what_it_is(metric: DocumentedMetric):
    assert metric.meaning and not metric.meaning.endswith(".")
    assert metric.name.startswith(("triptych_", "process_", *ODD_NAMES))
    if not metric.name.startswith(ODD_NAMES):
        assert (metric.kind == "counter") == metric.name.endswith("_total")


def test_one_name_is_one_metric():
    """Two processes may have it, with one type, one set of labels and one meaning."""
    names = [metric.name for metric in documented()]
    assert len(names) == len(set(names))


def test_every_label_is_explained():
    explained = PAGE.read_text().partition("## Labels")[2].partition("## All metrics")[0]
    labels = {label for metric in documented() for label in metric.labels}
    assert [label for label in sorted(labels) if f"`{label}`" not in explained] == ["version"]
