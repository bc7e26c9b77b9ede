"""Every bound that many requests share in a worker or the store is declared, and docs/limits.md shows it."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from support.hostile.bounds import bounds_below
from triptych.base.budgets import SharedBudget
from triptych.base.config import ClusterConfig, EncoderConfig, PDConfig, format_size
from triptych.base.config.flags import Config
from triptych.ec_connector.budgets import BUDGETS as STORE_BUDGETS
from triptych.encoder_worker import budgets as encoder_budgets
from triptych.pd_worker import budgets as pd_budgets

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "limits.md"
BEGIN, END = "<!-- budgets: begin -->\n", "<!-- budgets: end -->"
TABLES: dict[str, tuple[SharedBudget, ...]] = {
    "PD worker": pd_budgets.BUDGETS,
    "encoder worker": encoder_budgets.BUDGETS,
    "store": STORE_BUDGETS,
}
SHARING = {
    "turns": "in turns, the one with the least service next",
    "share": "each has a share",
    "proxy": "keys in turns, at each proxy",
    "order": "by arrival: no share",
}
#: Calls that bound no budget: by file and name, why.
NO_CALLS = {
    ("pd_worker", "vllm/http/client.py", "TCPConnector"): "to the one engine, of requests that are counted",
}
_BOUND = re.compile(r"max_.*|limit_.*|.*_(memory|credit|threads)|.*_max_.*")


def options(config: type[Config]) -> dict[str, object]:
    """The flags of a config and their defaults."""
    return {f"--{field.name.replace('_', '-')}": field.default for field in fields(config)}


FLAGS = options(ClusterConfig) | options(PDConfig) | options(EncoderConfig)


def table() -> str:
    lines = ["| of | budget | counts | size | tenants | above it |", "| --- | --- | --- | --- | --- | --- |"]
    for process, budgets in TABLES.items():
        lines += [
            f"| {process} | {budget.name} | {budget.of} | {_size(budget)} | {SHARING[budget.sharing]} | "
            f"{budget.above} |"
            for budget in budgets
        ]
    return "\n".join(lines) + "\n"


def _size(budget: SharedBudget) -> str:
    default = FLAGS.get(budget.flag)
    if budget.value or not isinstance(default, int):
        return f"`{budget.flag}`: {budget.value}" if budget.flag else budget.value
    size = format_size(default) if budget.flag.endswith("-memory") else str(default)
    return f"`{budget.flag}`: {size}"


@pytest.mark.parametrize(
    ("folder", "budgets"),
    [("pd_worker", pd_budgets.BUDGETS), ("encoder_worker", encoder_budgets.BUDGETS)]
    + [("ec_connector", ()), ("triptych/store", ())],
)
def test_no_call_bounds_what_is_declared_nowhere(folder, budgets):
    found = {
        f"{path}: {name}"
        for path, name in bounds_below(ROOT / folder)
        if (folder, path, name) not in NO_CALLS
    }
    declared = {made for budget in budgets for made in budget.made}
    if folder == "triptych/store":
        declared = {made.removeprefix("store/") for budget in STORE_BUDGETS for made in budget.made}
    assert found == declared, "declare a SharedBudget in its budgets.py, or say in NO_CALLS why it is none"


@pytest.mark.parametrize(("config", "declared"), [(PDConfig, pd_budgets), (EncoderConfig, encoder_budgets)])
def test_no_flag_sets_a_bound_that_is_declared_nowhere(config, declared):
    bounds = {field.name for field in fields(config) if _BOUND.fullmatch(field.name)}
    named = {budget.flag.removeprefix("--").replace("-", "_") for budget in declared.BUDGETS if budget.flag}
    assert bounds - named - set(declared.NO_BUDGETS) - {"threads", "store_memory"} == set()
    assert set(declared.NO_BUDGETS) <= bounds, "no longer a flag"


def test_every_flag_of_a_budget_is_one():
    flags = {budget.flag for budgets in TABLES.values() for budget in budgets if budget.flag}
    assert flags <= set(FLAGS)


def test_a_budget_has_one_name_in_its_process():
    for budgets in TABLES.values():
        assert len({budget.name for budget in budgets}) == len(budgets)


def test_the_page_shows_the_table():
    """TRIPTYCH_WRITE_QUOTAS=1 writes it."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("TRIPTYCH_WRITE_QUOTAS"):
        PAGE.write_text(text[:begin] + table() + text[end:])
        return
    assert text[begin:end] == table(), "write it with TRIPTYCH_WRITE_QUOTAS=1"
