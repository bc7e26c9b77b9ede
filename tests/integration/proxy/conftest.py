"""A proxy in a test looks at registry, workers and certificates several times as often as a deployed one."""

from __future__ import annotations

import pytest

from triptych.base.rpc.tls import certificates
from triptych.proxy import pool


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(pool, "HEALTH_INTERVAL", 0.2)
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.1)
