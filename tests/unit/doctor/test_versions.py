"""Versions that work are those of the package's metadata; what only workers need may be missing."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from triptych.apps.doctor.finding import CheckOutcome, CheckResult
from triptych.apps.doctor.machine import check_versions, needed

TORCH = Requirement('torch<2.14,>=2.11; extra == "worker"')
GRPC = Requirement("grpcio>=1.80")


def _results(found: dict[str, str], python: str = "3.12.1") -> dict[str, CheckResult]:
    results = check_versions([GRPC, TORCH], lambda name: found.get(name, ""), python)
    return {result.check: result for result in results}


def test_a_proxys_and_a_workers_libraries_are_needed_and_no_other_extras():
    worker = {one.name: one.marker is not None for one in needed()}
    assert (worker["grpcio"], worker["torch"]) == (False, True)
    assert not {"ray", "cryptography", "pytest"} & worker.keys()


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.13.0+cpu", True),
        ("2.11", True),
        ("2.10.9", False),
        ("2.14.0", False),
        ("2.9.0", False),
        ("nightly", False),
    ],
)
def test_a_version_is_compared_by_its_numbers(version, fits):
    results = _results({"torch": version, "grpcio": "1.85.1"})
    assert results["libraries"].found == f"{1 + fits} of 2 fit"
    assert ("torch" not in results) == fits
    if not fits:
        assert results["torch"].verdict is CheckOutcome.FAIL
        assert results["torch"].remedy.endswith("'torch<2.14,>=2.11'")


def test_a_proxy_needs_no_torch_but_grpc():
    results = _results({})
    assert results["worker"].verdict is CheckOutcome.NOTE and "torch missing" in results["worker"].found
    assert (results["grpcio"].verdict, results["grpcio"].found) == (CheckOutcome.FAIL, "not installed")
