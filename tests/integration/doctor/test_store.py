"""The checks of a store against real servers: right ones, wrong ones, and none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.processes.cluster import free_port
from support.stores.server import StoreServer
from support.stores.users import admin_url, guarded_server, role_url
from triptych.apps.cli.app import app
from triptych.apps.doctor.finding import CheckOutcome, CheckResult
from triptych.apps.doctor.store import check_store
from triptych.base.config import MIB
from triptych.store import keys


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with guarded_server(tmp_path) as server:
        yield server


async def by_check(url: str) -> dict[str, CheckResult]:
    return {result.check: result for _, results in await check_store(url, MIB) for result in results}


async def test_a_store_with_the_roles_users_has_nothing_that_fails_and_keeps_nothing_of_the_check(server):
    found = await by_check(admin_url(server.url))
    assert found.keys() >= {"version", "policy", "memory", "latency", "bandwidth", "epoch", "TLS", "login"}
    # Rates and latency depend on the machine.
    steady = {result.verdict for check, result in found.items() if check not in ("latency", "bandwidth")}
    assert steady == {CheckOutcome.OK}
    assert server.call("KEYS", "*") == [keys.EPOCH.encode()]


@pytest.mark.parametrize("role", ["proxy", "encoder", "pd"])
async def test_a_roles_own_user_checks_what_it_may(server: StoreServer, role: str) -> None:
    found = await by_check(role_url(server.url, role))
    assert not [result for result in found.values() if result.verdict is CheckOutcome.FAIL]
    assert ("written" in found["bandwidth"].found) == (role == "encoder")
    assert not [key for key in server.call("KEYS", "*") if key.startswith(b"ec:")]


async def test_a_store_that_evicts_registrations_and_is_open_to_all_is_named_so(tmp_path: Path) -> None:
    server = StoreServer(tmp_path / "open")
    server.start()
    try:
        server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        server.call("CONFIG", "SET", "maxmemory", "0")
        found = await by_check(server.url)
    finally:
        server.kill()
    assert found["policy"].verdict is CheckOutcome.FAIL
    assert found["memory"].verdict is CheckOutcome.FAIL
    assert found["login"].verdict is CheckOutcome.NOTE


def test_the_command_prints_the_table_and_ends_with_1_for_a_store_that_is_down() -> None:
    ran = CliRunner().invoke(app, ["store", "check", f"redis://127.0.0.1:{free_port()}/0"])
    assert ran.exit_code == 1
    assert "FAIL  reach" in ran.output
    assert "start the store" in ran.output
