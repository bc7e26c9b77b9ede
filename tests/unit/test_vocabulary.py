"""Types, carriers and calls that tell one life, by tests/tools/vocabulary.py: they do not grow back."""

from __future__ import annotations

import pytest
from tools import vocabulary


@pytest.mark.parametrize(("life", "maximum"), [(vocabulary.JOB, 8), (vocabulary.PD, 8)])
def test_a_life_is_told_by_few_types_of_events(life: str, maximum: int) -> None:
    found = vocabulary.types(life)
    assert sum(map(len, found.values())) <= maximum, f"a message that is there says it already: {found}"


@pytest.mark.parametrize(("what", "maximum", "holders"), [("an item's plan", 5, 1), ("a request", 8, 3)])
def test_data_are_spelled_few_times_on_their_way(what: str, maximum: int, holders: int) -> None:
    carriers = vocabulary.CARRIERS[what].split()
    for carrier in carriers:
        vocabulary.check_carrier(carrier)
    held = sum(carrier.startswith("+") for carrier in carriers)
    assert len(carriers) - held <= maximum and held <= holders


def test_every_class_with_a_plan_is_a_carrier_or_named_as_beside_the_way() -> None:
    vocabulary.check_plans()


def test_the_calls_for_a_planned_item_are_those_of_the_list() -> None:
    calls = vocabulary.calls()
    assert len(calls) <= 16
    assert max(inside for _, inside in calls) < 8, "one inside the other"
    assert [cls for cls, _ in calls].count("Dispatcher") == 1


def test_a_sampling_field_is_named_in_few_files() -> None:
    assert len(vocabulary.naming()) <= 6, vocabulary.naming()
