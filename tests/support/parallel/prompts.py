"""Prompts with transformers' greedy output behind them, as a batch, and transformers' logits of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from support.data.checkpoints import FAMILIES as MERGING
from support.data.checkpoints import build_checkpoint
from support.data.model_prompts import model_prompt, question
from support.data.oracle import oracle, teacher_forced_logits
from support.data.pictures import picture
from support.data.sounds import sound
from support.encdec.oracle import (
    audio_inputs,
    decoder_logits,
    encoder_rows,
    greedy,
    image_inputs,
    text_inputs,
)
from support.parallel.batches import RankBatch, open_decoder
from triptych.models.registry import family_of, load_encoder

CPU = torch.device("cpu")
#: Tokens that transformers says after each prompt.
NEW_TOKENS = 12


@dataclass(frozen=True)
class Said:
    """A batch of two prompts with what was said after them.

    `logits` are transformers' own at the tokens `at` of the batch, all in one.
    """

    batch: RankBatch
    at: torch.Tensor
    logits: torch.Tensor


@functools.cache
def said(family: str, variant: str) -> Said:
    """The same for every run of a checkpoint."""
    path = build_checkpoint(family, variant=variant)
    return _merged(path) if family in MERGING else _crossed(path)


def _merged(path: Path) -> Said:
    """A question about a picture, and one about none."""
    encoder = load_encoder(path, device=CPU, dtype=torch.float32)
    decoder = open_decoder(path, "float32", "none")
    ids: list[int] = []
    lengths: list[int] = []
    positions, rows, index, at, logits = [], [], [], [], []
    for images in ([picture(1, 64, 64)], []):
        result = oracle(path, question(len(images)), images, max_new_tokens=NEW_TOKENS)
        tokens = [*result.prompt_token_ids, *result.token_ids]
        prompt = model_prompt(encoder, decoder, tokens, images)
        start = sum(lengths)
        for feature, part in zip(prompt.features, prompt.rows, strict=True):
            index.append(torch.arange(feature.placement.offset, feature.placement.end) + start)
            rows.append(part)
        ids += tokens
        positions.append(decoder.positions(tokens, prompt.features)[0])
        lengths.append(len(tokens))
        at.append(torch.arange(len(tokens) - NEW_TOKENS - 1, len(tokens)) + start)
        logits.append(teacher_forced_logits(path, question(len(images)), images, result.token_ids))
    batch = RankBatch(lengths, torch.tensor(ids), torch.cat(positions, dim=1), rows, torch.cat(index))
    return Said(batch, torch.cat(at), torch.cat(logits))


def _crossed(path: Path) -> Said:
    """Two inputs of the encoder, of different lengths where it takes such."""
    modality = family_of(path).decoder.modality
    if modality == "audio":
        inputs = [audio_inputs(path, sound(seconds, seed=1)) for seconds in (0.5, 1.5)]
    elif modality == "image":
        inputs = [image_inputs(path, picture(seed)) for seed in (1, 2)]
    else:
        inputs = [text_inputs(path, text) for text in ("A calm sea.", "größer als " * 9)]
    ids: list[int] = []
    lengths: list[int] = []
    rows, logits = [], []
    for each in inputs:
        result = greedy(path, each, max_new_tokens=NEW_TOKENS)
        tokens = [*result.prompt_token_ids, *result.token_ids]
        ids += tokens
        lengths.append(len(tokens))
        rows.append(encoder_rows(path, each))
        logits.append(decoder_logits(path, each, tokens))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = RankBatch(lengths, torch.tensor(ids), positions, rows)
    return Said(batch, torch.arange(len(ids)), torch.cat(logits))
