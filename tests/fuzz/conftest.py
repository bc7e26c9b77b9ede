"""Every fuzz test in two sizes: quick, and thorough (slow)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hostile.fuzzing import Fuzzer

#: The thorough run's number of inputs is the quick one's, so many times.
THOROUGH = int(os.environ.get("TRIPTYCH_FUZZ_SCALE", "100"))


@pytest.fixture(
    params=[
        pytest.param(1, id="quick"),
        pytest.param(THOROUGH, id="thorough", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ]
)
def fuzzer(request: pytest.FixtureRequest, counts: dict[str, tuple[int, float]]) -> Fuzzer:
    began = time.monotonic()

    def report(name: str, count: int) -> None:
        counts[f"{name} ({request.node.callspec.id})"] = (count, time.monotonic() - began)

    return Fuzzer(request.param, report)


@pytest.fixture(scope="session")
def counts() -> Iterator[dict[str, tuple[int, float]]]:
    """Inputs and seconds by name; written to $TRIPTYCH_FUZZ_REPORT (JSON) where that is set."""
    counts: dict[str, tuple[int, float]] = {}
    yield counts
    if path := os.environ.get("TRIPTYCH_FUZZ_REPORT"):
        Path(path).write_text(json.dumps(counts, indent=1))
