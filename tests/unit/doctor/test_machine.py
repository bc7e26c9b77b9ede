"""Memory, cores, files, disk and ports, by plain values."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from triptych.apps.doctor.finding import CheckOutcome, CheckResult
from triptych.apps.doctor.machine import MachineState, check_machine, check_ports, readable_by_others
from triptych.base.config import GIB, MIB

WELL = MachineState(memory=8 * GIB, cpus=4, quota=None, files=65536, shm=64 * MIB, disk=20 * GIB)


def _findings(state: MachineState) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in check_machine(state, media_disk=4 * GIB)}


def test_a_machine_that_is_well_fails_nothing():
    assert {finding.verdict for finding in _findings(WELL).values()} == {CheckOutcome.OK}


@pytest.mark.parametrize(
    ("check", "state", "verdict"),
    [
        ("memory", replace(WELL, memory=500 * MIB), CheckOutcome.FAIL),
        ("cores", replace(WELL, quota=2.5), CheckOutcome.NOTE),
        ("cores", replace(WELL, quota=0.5), CheckOutcome.FAIL),
        ("files", replace(WELL, files=1024), CheckOutcome.FAIL),
        ("shm", replace(WELL, shm=0), CheckOutcome.NOTE),
        ("disk", replace(WELL, disk=GIB), CheckOutcome.NOTE),
    ],
)
def test_what_is_missing_is_found_with_its_remedy(check, state, verdict):
    findings = _findings(state)
    assert findings.pop(check).verdict is verdict
    assert {finding.verdict for finding in findings.values()} == {CheckOutcome.OK}
    assert _findings(state)[check].remedy


def test_a_taken_port_is_named_with_its_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = check_ports([("--grpc-port", "127.0.0.1", port)])
    assert finding.verdict is CheckOutcome.FAIL
    assert (finding.check, str(port) in finding.found) == ("--grpc-port", True)
    assert check_ports([("--grpc-port", "127.0.0.1", port)])[0].verdict is CheckOutcome.OK


def test_an_address_of_another_machine_and_a_number_that_is_no_port_fail():
    verdicts = [
        one.verdict for one in check_ports([("--port", "203.0.113.1", 80), ("--port", "127.0.0.1", 70000)])
    ]
    assert verdicts == [CheckOutcome.FAIL, CheckOutcome.FAIL]


@pytest.mark.parametrize(
    ("mode", "others"), [(0o600, (False, False)), (0o644, (True, False)), (0o622, (False, True))]
)
def test_who_else_may_use_a_file(tmp_path, mode, others):
    file = tmp_path / "token"
    file.write_text("x")
    file.chmod(mode)
    assert readable_by_others(file) == others
