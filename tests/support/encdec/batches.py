"""Batches of every encoder-decoder family through the engine, against `generate`."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from support.data.checkpoints import build_checkpoint
from support.data.oracle import MIN_DISTINCT, OracleResult, assert_exact
from support.data.pictures import picture
from support.data.sounds import sound
from support.encdec.cell import EncDecCheckpoint
from support.encdec.oracle import Inputs, audio_inputs, image_inputs
from support.encdec.oracle import greedy as oracle
from support.engine.engine_cell import engine_cell

#: Families whose decoder attends to encoder rows.
ENC_DEC = ("bart", "mbart", "t5", "whisper", "trocr")
TOKENS = 64
LENGTHS = (17, 23, 16, 6, 40, 9, 33, 12, 28)
CANDIDATES = 64


@functools.cache
def checkpoint_of(family: str, device: str) -> EncDecCheckpoint:
    return EncDecCheckpoint.open(build_checkpoint(family), device=device)


def inputs_of(family: str, path: Path, number: int, vocab: int) -> Inputs:
    """A sound, a picture, or a text; texts are of mixed lengths."""
    if family == "whisper":
        return audio_inputs(path, sound(1.0 + number * 2.5, seed=number))
    if family == "trocr":
        return image_inputs(path, picture(number, 60 + 9 * number, 40))
    rng = random.Random(number)
    return {
        "input_ids": torch.tensor([[rng.randrange(5, vocab) for _ in range(LENGTHS[number % len(LENGTHS)])]])
    }


def varied(checkpoint: EncDecCheckpoint, family: str, count: int) -> Iterator[tuple[Inputs, OracleResult]]:
    """The first `count` inputs of which the reference says enough different tokens."""
    vocab = checkpoint.decoder.geometry.vocab_size
    prompt = list(checkpoint.decoder.prompt_defaults({}).token_ids)
    for number in range(CANDIDATES):
        inputs = inputs_of(family, checkpoint.path, number, vocab)
        result = oracle(checkpoint.path, inputs, max_new_tokens=TOKENS, decoder_ids=prompt)
        if len(set(result.token_ids)) >= MIN_DISTINCT:
            yield inputs, result
            count -= 1
        if not count:
            return
    raise AssertionError(f"{count} inputs are left to find: the checkpoint says the same too often")


def answers_in_batches(
    family: str, counts: Sequence[int], device: str = "cpu", backend: str = "auto", decode_graphs: str = "off"
) -> None:
    """Batches of each size, from every place in the list of inputs, equal what each input gives alone."""
    checkpoint = checkpoint_of(family, device)
    prompt = list(checkpoint.decoder.prompt_defaults({}).token_ids)
    inputs, expected = zip(*varied(checkpoint, family, max(counts)), strict=True)
    flags: dict[str, Any] = {"max_model_len": 128, "kv_memory": 32 << 20, "prefix_caching": False}
    flags |= {"attention_backend": backend, "decode_graphs": decode_graphs}
    with engine_cell(checkpoint, **flags) as cell:
        for count in counts:
            batch = [(count + index) % len(inputs) for index in range(count)]
            outputs = cell.finish(
                [checkpoint.request(cell, inputs[number], prompt, TOKENS) for number in batch]
            )
            assert_exact([expected[number] for number in batch], outputs)
            cell.assert_at_rest()
        assert (cell.metric("triptych_pd_graph_steps_total") > 0) == (decode_graphs != "off")
