"""README's figures are those of the pages that it links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.kills.rows import rows_of

ROOT = Path(__file__).parents[3]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def page(name: str) -> str:
    return (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")


def said(pattern: str) -> tuple[int, ...]:
    """The numbers of README's sentence."""
    found = re.search(pattern, README)
    assert found, f"README has no sentence like {pattern!r}: change this test with it"
    return tuple(int(number.replace(",", "")) for number in found.groups())


def test_floods_that_were_held():
    floods, held = said(r"Of (\d+) floods by one key (\d+) left")
    assert f"Held: {held} of {floods} floods" in page("fairness")


@pytest.mark.parametrize(
    "fault, systems, sentence",
    [
        (
            "decoding server killed",
            ("native", "vllm-epd", "vllm-pd"),
            r"(\d+) of \d+ requests fail, of vLLM's EPD (\d+), of its prefill and decode apart (\d+)",
        ),
        ("encoder killed", ("native", "vllm-epd"), r"with an encoder killed (\d+) and (\d+)"),
    ],
)
def test_requests_that_failed_when_a_part_was_killed(fault: str, systems: tuple[str, ...], sentence: str):
    rows = {row.system: row for row in rows_of(page("kills")) if row.fault == fault}
    assert said(sentence) == tuple(rows[name].failed for name in systems)
    (requests,) = said(r"\d+ of (\d+) requests fail")
    assert {rows[name].requests for name in systems} == {requests}


def test_answers_and_faults_of_an_hour():
    faults, answers = said(r"with (\d+) faults on a CPU: ([\d,]+) answers")
    rows = dict(re.findall(r"\| ([a-z ]+) \| (\d+) \|", page("soak")))
    assert (rows["faults"], rows["requests answered"]) == (str(faults), str(answers))
