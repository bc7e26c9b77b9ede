"""Every budget of the proxy is a quota of its table, and no tenant shuts another one out of any."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.hostile.bounds import bounds_below
from support.hostile.quota_scenarios import RETRIEVAL, SCENARIOS
from support.hostile.two_tenants import two_tenants
from support.waiting import until
from triptych.base.config import ProxyConfig, format_size
from triptych.proxy.quotas.quota import QuotaSpec
from triptych.proxy.quotas.table import quota_specs

#: Files that the proxy of the table may open.
FILES = 65536
_HEAD = (
    "| quota | of | capacity | one may have | a claim waits | without progress | in total | above it |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def table(specs: Iterable[QuotaSpec]) -> str:
    """The quotas as a Markdown table."""
    return "\n".join([*_HEAD, *(_row(spec) for spec in specs)]) + "\n"


def _row(spec: QuotaSpec) -> str:
    size = format_size(spec.capacity) if spec.unit == "bytes" else f"{spec.capacity} {spec.unit}"
    capacity = f"`{spec.flag}`: {size}" if spec.flag else size
    share = max(int(spec.capacity * spec.share), spec.largest)
    one = format_size(share) if spec.unit == "bytes" else str(share)
    waits = (_seconds(seconds) for seconds in (spec.wait_seconds, spec.idle_seconds, spec.total_seconds))
    return f"| `{spec.name}` | {spec.per} | {capacity} | {one} | {' | '.join(waits)} | {spec.above} |"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds else "-"


PAGE = Path(__file__).parents[3] / "docs" / "limits.md"
BEGIN, END = "<!-- quotas: begin -->\n", "<!-- quotas: end -->"
QUOTAS = {spec.name: spec for spec in quota_specs(ProxyConfig())}


@pytest.mark.parametrize(
    ("name", "scenario"),
    [*((name, SCENARIOS.get(name)) for name in QUOTAS), *RETRIEVAL.values()],
    ids=[*QUOTAS, *RETRIEVAL],
)
async def test_a_tenant_that_takes_all_it_can_does_not_keep_another_one_out(name, scenario, store, tmp_path):
    """With keys they come from one address, as behind a gateway."""
    one_address = QUOTAS[name].per == "key"
    async with AsyncExitStack() as stack:
        tenants = await two_tenants(
            store, tmp_path, stack, tls=scenario.tls, one_address=one_address, **scenario.options
        )
        await scenario.take(tenants)
        await scenario.ask(tenants)
        await tenants.stack.aclose()
        quota = tenants.cluster.quotas[name]
        await until(lambda: not quota.used, f"{name} given back")


def test_every_scenario_is_of_a_quota() -> None:
    assert set(SCENARIOS) == set(QUOTAS)


#: What bounds a number or makes others wait, outside the quotas: by file and name, why it is no budget.
NO_BUDGETS = {
    ("admission.py", "Overloaded"): "backpressure of lost embeddings, and the media's budget",
    ("media/connection.py", "TCPConnector"): "of one fetch",
    ("media/spool.py", "Semaphore"): "of one request",
    ("openai/completions/endpoint.py", "Queue"): "of one request",
    ("parsing/parsers.py", "ThreadPoolExecutor"): "the thread of the quota `parser`",
    ("requests/output_queue.py", "Overloaded"): "of one stream: its client does not read, its worker goes on",
}
PROXY = Path(__file__).parents[3] / "proxy"


def test_no_budget_of_the_proxy_is_outside_its_table() -> None:
    found = {(path, name) for path, name in bounds_below(PROXY) if not path.startswith("quotas/")}
    assert found == set(NO_BUDGETS), "make it a QuotaSpec, or say in NO_BUDGETS why it is none"


def test_the_page_shows_the_table() -> None:
    """TRIPTYCH_WRITE_QUOTAS=1 writes it."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    shown = table(quota_specs(ProxyConfig(), FILES))
    if os.environ.get("TRIPTYCH_WRITE_QUOTAS"):
        PAGE.write_text(text[:begin] + shown + text[end:])
        return
    assert text[begin:end] == shown, "write it with TRIPTYCH_WRITE_QUOTAS=1"
