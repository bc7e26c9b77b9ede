"""Versions that work are those of pyproject.toml; what only workers need may be missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from triptych.doctor.finding import CheckOutcome
from triptych.doctor.versions import LEAST_PYTHON, LIBRARIES, check_versions, installed

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def _verdicts(found: dict[str, str], python: tuple[int, ...] = (3, 12, 1)) -> dict[str, CheckOutcome]:
    return {finding.check: finding.verdict for finding in check_versions(found, python)}


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_versions_are_those_of_the_project(name):
    wanted = LIBRARIES[name]
    lines = PROJECT["optional-dependencies"]["worker"] if wanted.worker else PROJECT["dependencies"]
    (line,) = [line for line in lines if re.match(rf"{name}(\[\w+\])?>=", line)]
    below = f",<{wanted.below}" if wanted.below else ""
    assert line.partition(">=")[2] == wanted.least + below


def test_the_python_is_that_of_the_project():
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, LEAST_PYTHON))


def test_what_is_installed_here_is_fit():
    assert set(_verdicts(installed()).values()) == {CheckOutcome.OK}


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.13.0+cpu", CheckOutcome.OK),
        ("2.11", CheckOutcome.OK),
        ("2.10.9", CheckOutcome.FAIL),
        ("2.14.0", CheckOutcome.FAIL),
        ("2.9.0", CheckOutcome.FAIL),
        ("nightly", CheckOutcome.FAIL),
    ],
)
def test_a_version_is_compared_by_its_numbers(version, verdict):
    assert _verdicts({"torch": version})["torch"] is verdict


def test_a_proxy_needs_no_torch_but_grpc():
    verdicts = _verdicts({})
    assert (verdicts["torch"], verdicts["grpcio"]) == (CheckOutcome.NOTE, CheckOutcome.FAIL)


def test_an_old_python_fails():
    assert _verdicts(installed(), (3, 10, 9))["python"] is CheckOutcome.FAIL
