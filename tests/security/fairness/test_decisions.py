"""Every flood is met by a decision that is tested without processes: a price, or whose turn it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.fairness.floods import FLOODS

ROOT = Path(__file__).parents[3]
_PRICES = (
    "security/fairness/test_prices.py",
    "a_floods_request_costs_the_loop_no_more_than_honest_ones",
)
#: By what a flood takes from others: the files and the tests that say how they are served beside it.
DECISIONS = {
    "loop": (
        _PRICES,
        (
            "integration/proxy/http/test_turns.py",
            "one_connection_is_served_soon_behind_many_of_another_address",
        ),
        (
            "unit/proxy/auth/test_middleware.py",
            "a_key_that_comes_with_many_requests_at_once_lets_another_one_begin",
        ),
    ),
    "parser": (_PRICES,),
    "engine": (
        (
            "unit/pd_worker/core/test_tenant_turns.py",
            "a_tenants_first_token_comes_within_eight_steps_and_its_own_prefill_however_full_the_engine_is",
        ),
    ),
    "decoder": (
        (
            "unit/encoder_worker/test_decode_places.py",
            "a_flood_of_one_tenant_is_served_in_turn_with_whoever_comes_later",
        ),
    ),
}


@pytest.mark.parametrize("kind", DECISIONS)
def test_what_a_flood_takes_is_shared_by_a_decision(kind):
    for path, name in DECISIONS[kind]:
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert f"test_{name}" in {getattr(node, "name", "") for node in tree.body}


def test_every_kind_of_flood_has_a_decision():
    assert {flood.kind for flood in FLOODS.values()} == set(DECISIONS)
