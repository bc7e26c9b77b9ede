"""Times of a PD worker's intake: messages parsed, rendered, tokenised, with their positions."""

from __future__ import annotations

import json

from triptych.models.base import DecoderSide
from triptych.pd_worker.frontend.prompt import PromptBuilder
from triptych.simulator.profile.fit import Sample
from triptych.simulator.profile.timing import Deadline, Effort, timed

#: Words of the texts.
_LENGTHS = (1, 512, 64, 256, 16, 1024, 128, 32)


def intake_samples(prompts: PromptBuilder, decoder: DecoderSide, effort: Effort) -> list[Sample]:
    """Chat prompts of text; their tokens, template included, are counted after they are made."""
    deadline = Deadline(effort.stage_seconds)
    samples: list[Sample] = []
    for words in _LENGTHS:
        text = " ".join(f"word{index % 10}" for index in range(words))
        messages = json.dumps([{"role": "user", "content": text}]).encode()

        def work(messages: bytes = messages) -> None:
            prompt = prompts.build(messages, [])
            decoder.positions(prompt.token_ids, prompt.features)

        tokens = len(prompts.build(messages, []).token_ids)
        samples.append(timed(work, {"take_request": 1, "take_token": tokens}, effort))
        if deadline.over and len(samples) >= 4:
            break
    return samples
