"""All checks together: one that breaks keeps no other from its answer, and the exit code tells."""

from __future__ import annotations

import socket
import threading

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from triptych.apps.cli.app import app
from triptych.apps.doctor import run
from triptych.apps.doctor.cluster import PageReply, check_health, check_models, check_ready, look_at_cluster
from triptych.apps.doctor.finding import CheckOutcome, CheckResult, fail, fail_of, failed, note, ok, table
from triptych.apps.doctor.machine import check_versions, needed
from triptych.base.config import DoctorConfig
from triptych.base.errors import ConfigError


def _headings(config: DoctorConfig) -> list[str]:
    return [heading for heading, _ in run.examine(config)]


def test_the_store_and_a_cluster_are_looked_at_when_they_are_named():
    alone = _headings(DoctorConfig())
    assert alone == ["versions", "machine", "devices and model", "secrets", "ports"]
    named = _headings(DoctorConfig(store="redis://127.0.0.1:1/0", url="http://127.0.0.1:1"))
    assert named == [
        "versions",
        "machine",
        "devices and model",
        "secrets",
        "store redis://127.0.0.1:1/0",
        "cluster",
    ]


def test_a_check_that_breaks_is_a_failure_of_its_own(monkeypatch: pytest.MonkeyPatch):
    def broken(found: object) -> list[object]:
        raise RuntimeError("odd")

    monkeypatch.setattr(run, "check_versions", broken)
    first, *others = run.examine(DoctorConfig())
    assert "RuntimeError: odd" in first[1][0].found and failed([first])
    assert all(findings for _, findings in others)


def test_a_flag_that_cannot_be_used_is_a_failure_with_its_remedy():
    result = CliRunner().invoke(app, ["doctor", "--store", "nonsense://x", "--port", "0", "--grpc-port", "0"])
    assert result.exit_code == 1 and "redis://" in result.output


GROUPS = [
    ("machine", [ok("memory", "8 GiB"), fail("files", "256", "ulimit -Hn 65536")]),
    ("empty", []),
    ("store", [note("persistence", "on", "CONFIG SET save ''")]),
]


def test_every_check_is_a_line_and_remedies_are_below_theirs():
    assert table(GROUPS).splitlines() == [
        "machine",
        "  ok    memory       8 GiB",
        "  FAIL  files        256",
        "                     -> ulimit -Hn 65536",
        "store",
        "  note  persistence  on",
        "                     -> CONFIG SET save ''",
        "1 of 3 checks failed, 1 notes",
    ]


def test_only_failures_fail():
    assert failed(GROUPS)
    assert not failed(GROUPS[1:])


def test_a_text_of_a_server_neither_ends_the_line_nor_moves_the_cursor():
    text = table([("store", [ok("version", "7.0\n  FAIL  forged\x1b[2J\u2028")])])
    assert len(text.splitlines()) == 3 and "\x1b" not in text


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (PageReply(200, '{"status": "ready"}'), CheckOutcome.OK),
        (PageReply(200, '{"status": "ready", "degraded": "store"}'), CheckOutcome.FAIL),
        (PageReply(503, '{"status": "no PD worker is live"}'), CheckOutcome.FAIL),
        (PageReply(503, "<html>"), CheckOutcome.FAIL),
        (PageReply(503, "[]"), CheckOutcome.FAIL),
        (PageReply(error="timed out"), CheckOutcome.FAIL),
    ],
)
def test_a_proxy_that_is_not_ready_says_why(answer, verdict):
    assert check_ready(answer).verdict is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (PageReply(200, '{"data": [{"id": "demo"}]}'), CheckOutcome.OK),
        (PageReply(200, '{"data": []}'), CheckOutcome.FAIL),
        (PageReply(401, "{}"), CheckOutcome.NOTE),
        (PageReply(200, "{}"), CheckOutcome.FAIL),
        (PageReply(200, '{"data": [1]}'), CheckOutcome.FAIL),
        (PageReply(502, "<html>"), CheckOutcome.FAIL),
    ],
)
def test_models_are_listed(answer, verdict):
    assert check_models(answer).verdict is verdict


def test_another_server_is_no_proxy():
    assert check_health(PageReply(404)).verdict is CheckOutcome.FAIL


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "file:///etc/passwd", "10.0.0.5:8000", "http://[::1:8000"]
)
def test_an_address_that_is_none_or_does_not_answer_is_one_failure(url):
    (finding,) = look_at_cluster(url)
    assert finding.verdict is CheckOutcome.FAIL and finding.remedy


def test_a_port_of_another_protocol_is_a_failure_and_no_fault_of_the_check():
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as client:
            client.recv(1000)
            client.sendall(b"-ERR wrong number of arguments\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        (finding,) = look_at_cluster(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert finding.verdict is CheckOutcome.FAIL and finding.remedy


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


@pytest.mark.parametrize(
    ("error", "found", "remedy"),
    [
        (
            "config.json cannot be read (line 2: no value): fetch it again",
            "(line 2: no value)",
            "fetch it again",
        ),
        ("--port 9 is taken: choose another", "--port 9 is taken", "choose another"),
        ("--x {y: 1} is none", "--x {y: 1} is none", "see the flag's --help"),
    ],
)
def test_a_failure_ends_its_reason_at_a_colon_that_is_not_in_brackets(
    error: str, found: str, remedy: str
) -> None:
    told = fail_of("model", ConfigError(error))
    assert told.found.endswith(found)
    assert told.remedy == remedy
