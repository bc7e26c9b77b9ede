"""Rules on outputs equal transformers' processors, whatever was said before."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from triptych.models.base import GenerationDefaults, LogitsRule
from triptych.models.families.logits_rules import Only, Timestamps, checkpoint_rules

VOCABULARY = 40
EOS = 2
#: Token of 0.00 s; the one before says that there are no times.
FIRST_TIME = 25


def ruled(rules: Sequence[LogitsRule], prompt: list[int], output: list[int], seed: int) -> torch.Tensor:
    logits = scores(seed)
    for rule in rules:
        rule.apply(logits, prompt, output)
    return logits


def scores(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def processed(processors: list[object], ids: list[int], seed: int) -> torch.Tensor:
    out: torch.Tensor = LogitsProcessorList(processors)(torch.tensor([ids]), scores(seed)[None])[0]
    return out


@pytest.mark.parametrize("seed", range(6))
def test_a_summarisers_rules_are_those_of_generate(seed: int) -> None:
    said = {
        "no_repeat_ngram_size": 2,
        "min_length": 7,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": EOS,
        "suppress_tokens": [9, 11],
        "begin_suppress_tokens": [12],
    }
    rules = checkpoint_rules(GenerationDefaults(eos_token_ids=(EOS,), extra=said), {"max_tokens": 9})
    random = torch.Generator().manual_seed(seed)
    prompt, output = [EOS], []
    while len(output) < 9:
        processors = [
            NoRepeatNGramLogitsProcessor(2),
            MinLengthLogitsProcessor(7, EOS),
            ForcedBOSTokenLogitsProcessor(0),
            ForcedEOSTokenLogitsProcessor(10, EOS),
            SuppressTokensLogitsProcessor([9, 11]),
            SuppressTokensAtBeginLogitsProcessor([12], 2),
        ]
        wanted = processed(processors, [*prompt, *output], seed + len(output))
        found = ruled(rules, prompt, output, seed + len(output))
        assert torch.equal(found, wanted)
        # Few tokens, so that pairs come again.
        output.append(int(torch.randint(3, 6, (1,), generator=random)))


@pytest.mark.parametrize("last_initial", [None, 3])
@pytest.mark.parametrize("seed", range(8))
def test_times_follow_the_rules_of_whispers_generate(seed: int, last_initial: int | None) -> None:
    config = SimpleNamespace(
        no_timestamps_token_id=FIRST_TIME - 1,
        eos_token_id=EOS,
        bos_token_id=EOS,
        max_initial_timestamp_index=last_initial,
    )
    prompt, output = [20, 21], []
    rule = Timestamps(FIRST_TIME, EOS, last_initial)
    while len(output) < 14:
        processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
        wanted = processed([processor], [*prompt, *output], seed * 100 + len(output))
        found = ruled([rule], prompt, output, seed * 100 + len(output))
        assert torch.equal(found, wanted)
        if not found.isfinite().any():
            break
        output.append(int(found.argmax()))
    assert any(token >= FIRST_TIME for token in output)


def test_an_unfinished_request_meets_its_rules_again_with_all_tokens() -> None:
    rules = checkpoint_rules(GenerationDefaults(extra={"no_repeat_ngram_size": 2}), {})
    assert ruled(rules, [2], [5, 6, 5], 1)[6] == float("-inf")
    assert ruled(rules, [2, 5, 6], [5], 1)[6] == float("-inf")


def test_the_first_token_may_only_be_a_language() -> None:
    found = ruled([Only((4, 7))], [20], [], 3)
    assert found.isfinite().nonzero().flatten().tolist() == [4, 7]
    assert torch.equal(found[[4, 7]], scores(3)[[4, 7]])
    assert torch.equal(ruled([Only((4, 7))], [20], [4], 3), scores(3))


def test_tokens_beyond_the_vocabulary_are_left_aside() -> None:
    rules = checkpoint_rules(GenerationDefaults(extra={"suppress_tokens": [3, 99, -1]}), {})
    assert ruled(rules, [0], [], 0).isinf().nonzero().flatten().tolist() == [3]


def test_a_checkpoint_without_rules_has_none() -> None:
    assert checkpoint_rules(GenerationDefaults(extra={"num_beams": 4}), {"max_tokens": 5}) == ()
