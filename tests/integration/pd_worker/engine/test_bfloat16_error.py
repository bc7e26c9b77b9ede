"""In bf16 our logits are at most twice as far from transformers' fp32 ones as its own bf16 ones are."""

from __future__ import annotations

import pytest
import torch

from support.data.checkpoints import FAMILIES
from support.data.oracle import teacher_forced_logits
from support.engine.engine_cell import Checkpoint, Prompt, engine_cell, reference

PROMPT = Prompt("Compare these two.", ((1, 96, 64), (3, 64, 64)))
TOKENS = 24
#: Tokens of a step: prompts are prefilled in chunks that cut the pictures.
BUDGET = 29


class _Teacher:
    """Keeps the logits of every step, and makes the sampler take the reference's token."""

    def __init__(self, checkpoint: Checkpoint, token_ids: list[int]) -> None:
        self._logits = checkpoint.decoder.logits
        self._token_ids = token_ids
        self.seen: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden)
        assert logits.dtype == torch.bfloat16
        (row,) = logits
        forced = torch.full_like(logits, -1.0)
        forced[0, self._token_ids[len(self.seen)]] = 1.0
        self.seen.append(row.float())
        return forced


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_logit_error_is_at_most_twice_that_of_transformers(family, monkeypatch):
    checkpoint = Checkpoint.open(family, dtype=torch.bfloat16)
    result = reference(checkpoint.path, PROMPT, TOKENS)
    teacher = _Teacher(checkpoint, result.token_ids)
    monkeypatch.setattr(checkpoint.decoder, "logits", teacher)
    with engine_cell(checkpoint, max_num_batched_tokens=BUDGET) as cell:
        assert cell.answer([PROMPT], TOKENS) == [result.token_ids]
        assert cell.metric("triptych_pd_chunked_prefills_total") > 0
    given = (checkpoint.path, PROMPT.messages, PROMPT.images, result.token_ids[:-1])
    exact = teacher_forced_logits(*given)
    theirs = teacher_forced_logits(*given, dtype=torch.bfloat16).float()
    ours = torch.stack(teacher.seen)
    assert ours.shape == exact.shape == theirs.shape
    assert 0 < (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()
