"""Files of secrets: who may read them, whether they can be used, and that none is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.apps.doctor.finding import CheckOutcome, CheckResult, table
from triptych.apps.doctor.secrets import certificate_finding, check_secrets
from triptych.base.config import ProxyConfig

SECRET = "a-secret-of-more-than-16-characters"
DAY = 86400.0


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    return file


def _findings(**flags: object) -> dict[str, CheckResult]:
    config = ProxyConfig(**flags)  # type: ignore[arg-type]
    return {finding.check: finding for finding in check_secrets(config)}


@pytest.mark.parametrize(
    ("mode", "verdict"), [(0o644, CheckOutcome.NOTE), (0o666, CheckOutcome.FAIL), (0o660, CheckOutcome.FAIL)]
)
def test_a_file_that_others_may_read_or_write_is_named(token, mode, verdict):
    token.chmod(mode)
    finding = _findings(internal_token_file=str(token))["--internal-token-file"]
    assert finding.verdict is verdict and f"chmod 600 {token}" in finding.remedy


def test_a_missing_file_fails_by_its_flag(tmp_path):
    findings = _findings(api_key_file=str(tmp_path / "keys"))
    assert findings["--api-key-file"].verdict is CheckOutcome.FAIL
    assert findings["API keys"].verdict is CheckOutcome.FAIL


def test_a_short_token_fails_with_how_to_make_one(token):
    token.write_text("short")
    finding = _findings(internal_token_file=str(token))["internal token"]
    assert finding.verdict is CheckOutcome.FAIL and "openssl rand" in finding.remedy


def test_a_key_file_without_keys_fails(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    assert _findings(api_key_file=str(file))["API keys"].verdict is CheckOutcome.FAIL


def test_a_front_door_that_is_open_to_other_machines_fails():
    finding = _findings(host="0.0.0.0")["front door"]
    assert finding.verdict is CheckOutcome.FAIL and "--api-key-file" in finding.remedy


def test_no_secret_is_shown(token, tmp_path):
    flags = {
        "internal_token_file": str(token),
        "api_key": "sk-" + SECRET,
        "store": f"redis://:{SECRET}@h:1/0",
    }
    text = table([("secrets", list(_findings(**flags).values()))])
    assert SECRET not in text
    token.write_text(SECRET[:15])
    assert SECRET[:15] not in table([("secrets", list(_findings(**flags).values()))])


@pytest.mark.parametrize(
    ("days", "verdict"), [(90, CheckOutcome.OK), (13, CheckOutcome.NOTE), (-1, CheckOutcome.FAIL)]
)
def test_a_certificate_is_judged_by_its_last_day(days, verdict):
    assert certificate_finding("front TLS", 1e9 + days * DAY, 1e9).verdict is verdict
