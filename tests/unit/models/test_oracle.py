"""The rule that decides what is exact."""

from __future__ import annotations

import pytest

from support.data.checkpoints import FAMILIES, build_checkpoint
from support.data.model_prompts import question
from support.data.oracle import OracleResult, assert_exact, oracle
from support.data.pictures import picture

TOKENS = list(range(40))


def result(margins: dict[int, float] | None = None) -> OracleResult:
    values = [(margins or {}).get(index, 1.0) for index in range(len(TOKENS))]
    return OracleResult([1], list(TOKENS), values, [token + 100 for token in TOKENS])


def test_equal_outputs_are_exact() -> None:
    assert_exact([result()] * 3, [TOKENS] * 3)


def test_a_difference_without_a_tie_is_none() -> None:
    with pytest.raises(AssertionError, match="margin"):
        assert_exact([result()] * 100, [[*TOKENS[:5], 105, *TOKENS[6:]], *[TOKENS] * 99])


def test_the_runner_up_of_a_tie_is_admitted_once_in_a_hundred() -> None:
    tied = [*TOKENS[:5], 105, 3, 4]
    results = [result({5: 1e-5})] * 100
    assert_exact(results, [tied, *[TOKENS] * 99])
    with pytest.raises(AssertionError, match="2 of 100"):
        assert_exact(results, [tied, tied, *[TOKENS] * 98])


def test_another_token_at_a_tie_is_not_admitted() -> None:
    with pytest.raises(AssertionError, match="runner-up"):
        assert_exact([result({5: 1e-5})] * 100, [[*TOKENS[:5], 77], *[TOKENS] * 99])


def test_a_shorter_output_is_not_exact() -> None:
    with pytest.raises(AssertionError, match="39 tokens"):
        assert_exact([result()] * 100, [TOKENS[:-1], *[TOKENS] * 99])


def test_a_reference_without_variety_proves_nothing() -> None:
    dull = OracleResult([1], [1] * 40, [1.0] * 40, [2] * 40)
    with pytest.raises(AssertionError, match="distinct"):
        assert_exact([dull], [[1] * 40])


@pytest.mark.parametrize("variant", ["", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_references_are_varied_and_depend_on_the_image(family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    one, other = (oracle(path, question(1), [picture(seed)], max_new_tokens=64) for seed in (1, 2))
    assert_exact([one, other], [one.token_ids, other.token_ids])
    assert one.token_ids[:5] != other.token_ids[:5]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_spelling_of_a_checkpoint_gives_the_same_reference(family: str) -> None:
    variants = ("", "hub", "sharded", "list_eos+sampling")
    paths = [build_checkpoint(family, variant=variant) for variant in variants]
    outputs = [oracle(path, question(1), [picture(1)], max_new_tokens=8).token_ids for path in paths]
    assert outputs == [outputs[0]] * len(variants)
