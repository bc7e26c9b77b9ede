"""What the doctor says of the machine and of secrets."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from triptych.apps.doctor.finding import CheckOutcome, CheckResult, table
from triptych.apps.doctor.machine import (
    MachineState,
    certificate_finding,
    check_machine,
    check_ports,
    check_secrets,
    readable_by_others,
)
from triptych.base.config import GIB, MIB, ProxyConfig

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


SECRET = "a-secret-of-more-than-16-characters"
DAY = 86400.0


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    return file


def _findings_of_secrets(**flags: object) -> dict[str, CheckResult]:
    config = ProxyConfig(**flags)  # type: ignore[arg-type]
    return {finding.check: finding for finding in check_secrets(config)}


@pytest.mark.parametrize(
    ("mode", "verdict"), [(0o644, CheckOutcome.NOTE), (0o666, CheckOutcome.FAIL), (0o660, CheckOutcome.FAIL)]
)
def test_a_file_that_others_may_read_or_write_is_named(token, mode, verdict):
    token.chmod(mode)
    finding = _findings_of_secrets(internal_token_file=str(token))["--internal-token-file"]
    assert finding.verdict is verdict and f"chmod 600 {token}" in finding.remedy


def test_a_missing_file_fails_by_its_flag(tmp_path):
    findings = _findings_of_secrets(api_key_file=str(tmp_path / "keys"))
    assert findings["--api-key-file"].verdict is CheckOutcome.FAIL
    assert findings["API keys"].verdict is CheckOutcome.FAIL


def test_a_short_token_fails_with_how_to_make_one(token):
    token.write_text("short")
    finding = _findings_of_secrets(internal_token_file=str(token))["internal token"]
    assert finding.verdict is CheckOutcome.FAIL and "openssl rand" in finding.remedy


def test_a_key_file_without_keys_fails(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    assert _findings_of_secrets(api_key_file=str(file))["API keys"].verdict is CheckOutcome.FAIL


def test_a_front_door_that_is_open_to_other_machines_fails():
    finding = _findings_of_secrets(host="0.0.0.0")["front door"]
    assert finding.verdict is CheckOutcome.FAIL and "--api-key-file" in finding.remedy


def test_no_secret_is_shown(token, tmp_path):
    flags = {
        "internal_token_file": str(token),
        "api_key": "sk-" + SECRET,
        "store": f"redis://:{SECRET}@h:1/0",
    }
    text = table([("secrets", list(_findings_of_secrets(**flags).values()))])
    assert SECRET not in text
    token.write_text(SECRET[:15])
    assert SECRET[:15] not in table([("secrets", list(_findings_of_secrets(**flags).values()))])


@pytest.mark.parametrize(
    ("days", "verdict"), [(90, CheckOutcome.OK), (13, CheckOutcome.NOTE), (-1, CheckOutcome.FAIL)]
)
def test_a_certificate_is_judged_by_its_last_day(days, verdict):
    assert certificate_finding("front TLS", 1e9 + days * DAY, 1e9).verdict is verdict


def test_a_port_that_is_given_twice_fails():
    config = ProxyConfig(port=9000, grpc_port=9000)
    (finding,) = (one for one in check_secrets(config) if one.check == "ports")
    assert finding.verdict is CheckOutcome.FAIL
    assert "--grpc-port 9000" in finding.found


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("allowed_origins", "chat.example/path"),
        ("allowed_hosts", "https://chat.example"),
        ("trusted_proxies", "gateway"),
        ("allow_media_networks", "10.0.0.0/33"),
        ("allowed_media_folder", "/nowhere"),
    ],
)
def test_a_flag_that_the_proxy_refuses_fails_with_the_remedy(flag: str, value: str) -> None:
    finding = _findings_of_secrets(**{flag: value})["proxy flags"]
    assert finding.verdict is CheckOutcome.FAIL and finding.remedy
    assert f"--{flag.replace('_', '-')}" in finding.found and value in finding.found


def test_flags_that_the_proxy_takes_are_told(tmp_path: Path) -> None:
    flags = {"allowed_origins": "https://chat.example", "allowed_media_folder": str(tmp_path)}
    assert _findings_of_secrets(**flags)["proxy flags"].verdict is CheckOutcome.OK
