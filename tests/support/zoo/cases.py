"""One recipe's checkpoint under the adapter, its prompts, and what transformers answers to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from support.engine.engine_cell import EngineCell, engine_cell
from support.zoo.checkpoint import model_of
from support.zoo.engine import Served
from support.zoo.models import Prompt, Reference, generate, prompts
from triptych.base.config import MIB

#: A first difference is admitted below this margin between the reference's two best logits.
_TIE = 1e-4


@dataclass
class Case:
    """A class, opened once for all of its tests."""

    served: Served
    prompts: list[Prompt]
    references: list[Reference]

    @classmethod
    def open(
        cls, name: str, count: int, served: Served | None = None, model: PreTrainedModel | None = None
    ) -> Case:
        """By the adapter for all classes, or by these sides; `model` answers for transformers."""
        served, model = served or Served.open(name), model or model_of(name)
        asked = prompts(served.recipe)
        return cls(served, asked, [generate(served.recipe, model, prompt, count) for prompt in asked])

    @property
    def count(self) -> int:
        return len(self.references[0].token_ids)

    @contextmanager
    def engine(self, budget: int = 4096, **flags: Any) -> Iterator[EngineCell]:
        """An engine whose steps take `budget` tokens, or the longest span that cannot be cut."""
        spans = [
            end - start
            for prompt in self.prompts
            for start, end in self.served.decoder.prompt_inputs(
                prompt.token_ids, self.served.features(prompt)
            ).spans
        ]
        values = {"max_model_len": 512, "kv_memory": 32 * MIB, "block_size": 8, **flags}
        with engine_cell(self.served, max_num_batched_tokens=max([budget, *spans]), **values) as cell:
            yield cell

    def answer(self, cell: EngineCell, numbers: Sequence[int] | None = None) -> list[list[int]]:
        """The answers to these of the prompts, at once; None: to all."""
        asked = self.prompts if numbers is None else [self.prompts[number] for number in numbers]
        return cell.finish([self.served.request(cell, prompt, self.count) for prompt in asked])

    def blank_answer(self, cell: EngineCell) -> list[int]:
        """The answer to the first prompt whose picture's rows are zeros."""
        (answer,) = cell.finish([self.served.request(cell, self.prompts[0], self.count, blank=True)])
        return answer

    def assert_exact(self, answers: Sequence[Sequence[int]], numbers: Sequence[int] | None = None) -> None:
        chosen = range(len(self.prompts)) if numbers is None else numbers
        for number, answer in zip(chosen, answers, strict=True):
            assert_exact(self.references[number], answer, f"prompt {number}")


def assert_exact(reference: Reference, answer: Sequence[int], where: str) -> None:
    """The answer is the reference, up to a tie."""
    assert len(answer) == len(reference.token_ids), f"{where}: {len(answer)} tokens"
    pairs = enumerate(zip(reference.token_ids, answer, strict=True))
    index = next((at for at, (one, other) in pairs if one != other), None)
    if index is not None:
        first, second = torch.topk(reference.logits[index], 2).values.tolist()
        margin = f"{where}: token {index} is {answer[index]}, not {reference.token_ids[index]}"
        assert first - second < _TIE, f"{margin}; margin {first - second:.1e}"
