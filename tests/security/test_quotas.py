"""Every budget of the proxy is a quota of its table, and no tenant shuts another one out of any."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.hostile.quota_scenarios import SCENARIOS
from support.hostile.two_tenants import two_tenants
from support.waiting import until
from triptych.config import ProxyConfig
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.proxy.quotas.table import quota_specs

#: Rows whose budgets are not quotas yet.
PENDING = {"fetches", "media"}
NAMES = [spec.name for spec in quota_specs(ProxyConfig()) if spec.name not in PENDING]


@pytest.mark.parametrize("name", NAMES)
async def test_a_tenant_that_takes_all_it_can_does_not_keep_another_one_out(
    name: str, store: EmbeddingStore, tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    async with AsyncExitStack() as stack:
        tenants = await two_tenants(store, tmp_path, stack, tls=scenario.tls, **scenario.options)
        await scenario.take(tenants)
        await scenario.ask(tenants)
        await tenants.stack.aclose()
        quota = tenants.cluster.quotas[name]
        await until(lambda: not quota.used, f"{name} given back")


def test_every_scenario_is_of_a_quota() -> None:
    assert set(SCENARIOS) == set(NAMES)
