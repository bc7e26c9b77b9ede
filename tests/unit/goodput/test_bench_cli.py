"""`triptych bench`: what cannot work is said by flag before anything is sent."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from triptych.apps.cli.app import app
from triptych.base.errors import ConfigError

SERVER = ("--url", "http://127.0.0.1:9")


def bench(*words: str):
    return CliRunner().invoke(app, ["bench", *words], catch_exceptions=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--url"),
        ((*SERVER, "--launch", "1E1PD"), "--launch"),
        (("--launch", "E1PD"), "--launch"),
        (("--launch", "0E1PD"), "--launch"),
        (("--launch", "0colocated"), "--launch"),
        (("--launch", "1E1PD", "--rate", "-1"), "--rate"),
        (("--launch", "1E1PD", "--trace", "t", "--rate", "1"), "--trace"),
        (("--url", "127.0.0.1:9"), "http://"),
        ((*SERVER, "--workload", "nothing"), "--workload"),
        ((*SERVER, "--slo", "itl:1"), "--slo"),
        ((*SERVER, "--rate", "0"), "--rate"),
        ((*SERVER, "--sweep", "--rate", "3"), "--sweep has the preset's rates"),
        ((*SERVER, "--images", "x"), "--images"),
        ((*SERVER, "--image-reuse", "1"), "--image-reuse"),
        ((*SERVER, "--extra-body", "[]"), "--extra-body"),
        ((*SERVER, "--extra-body", "{"), "--extra-body"),
        ((*SERVER, "--arrivals", "ramp"), "--ramp-to"),
        ((*SERVER, "--arrivals", "gamma", "--burstiness", "0"), "--burstiness"),
        (SERVER, "does not answer"),
    ],
)
def test_a_measurement_that_is_impossible_is_an_error_that_names_the_flag(words, said):
    result = bench("goodput", *words)
    assert isinstance(result.exception, ConfigError | SystemExit)
    assert said in f"{result.exception} {result.stderr}"


@pytest.mark.parametrize("loop", [("--concurrency", "4"), ("--trace", "t")])
def test_two_servers_are_not_compared_at_a_rate_that_is_not_run(loop):
    result = bench("ab", "--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1", *loop, "--rate", "8")
    assert "--concurrency and --trace go without --rate" in str(result.exception)


@pytest.mark.parametrize("missing", ["matplotlib", "triptych_bench"])
def test_without_its_distribution_the_command_names_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    result = bench("workloads")
    assert isinstance(result.exception, ConfigError)
    assert "pip install triptych-bench" in str(result.exception)
