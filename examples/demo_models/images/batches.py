"""From samples to batches: the image processor's and the chat template's work, done fast.

Pixels, tokens and positions equal what transformers makes of the same PNG and the same messages.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from tokenizers import Tokenizer

from examples.demo_models.images.samples import NO_IMAGE, SMALL_TALK, Sample, random_sample
from examples.demo_models.images.scenes import COLOURS, PLACES, SHAPES, Picture, draw
from examples.demo_models.images.structured import (
    WRITTEN,
    ToolCall,
    drawn_call,
    drawn_fields,
    value_of,
    weighed_json,
)
from examples.demo_models.images.tokens import SYSTEM_PROMPTS

PATCH = 16  # pixels
MERGE = 2  # patches a side in one token
LEAST_PIXELS, MOST_PIXELS = 96 * 96, 128 * 128
IGNORED = -100
_NEAR = 18  # pixels from the middle of a shape to that of a token that shows it
_ONE_IMAGE_PART, _MIXING_PART = 0.2, 0.15  # of the run
_STRUCTURED_PART = 0.55  # of the sequences answer in JSON
_ROW_LENGTH = 256  # tokens; several sequences are packed into a row

Json = tuple[str, list[float]]  # text, and the weights of its characters
FloatArray = npt.NDArray[np.float32]


def patches(image: Image.Image) -> FloatArray:
    """[patches, 1536] of a picture whose sides are multiples of 32 pixels, as -1..1."""
    pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(127.5) - 1
    _, height, width = pixels.shape
    side = PATCH * MERGE
    split = pixels.reshape(3, height // side, MERGE, PATCH, width // side, MERGE, PATCH)
    ordered = split.transpose(1, 4, 2, 5, 0, 3, 6)
    doubled = np.broadcast_to(ordered[:, :, :, :, :, None], (*ordered.shape[:5], 2, PATCH, PATCH))
    return doubled.reshape(-1, 3 * 2 * PATCH * PATCH)


def picture_patches(picture: Picture) -> FloatArray:
    """[patches, 1536]; a picture drawn larger is brought down as the image processor does it."""
    image = draw(picture)
    if image.size != picture.size:
        image = image.resize(picture.size, Image.Resampling.BICUBIC)
    return patches(image)


def seen_in_tokens(picture: Picture) -> npt.NDArray[np.int64]:
    """[tokens, 2]: number of the colour and of the shape that an image token shows, where it does.

    Tokens around the middle of a quarter without a shape get the number after the last of each;
    the other tokens, which show background or parts of shapes, are IGNORED.
    """
    columns, rows = (side // (PATCH * MERGE) for side in picture.size)
    out = np.full((rows, columns, 2), IGNORED)
    y, x = (np.arange(n) * PATCH * MERGE + PATCH for n in (rows, columns))  # middles, in pixels
    found = dict(zip((item.place for item in picture.scene), picture.blobs, strict=True))
    kinds = {item.place: item for item in picture.scene}
    for number, place in enumerate(PLACES):
        numbers = (len(COLOURS), len(SHAPES))
        middle = (0.25 + number % 2 / 2, 0.25 + number // 2 / 2)
        if place in kinds:
            item = kinds[place]
            numbers = (list(COLOURS).index(item.colour), SHAPES.index(item.shape))
            middle = (found[place].x, found[place].y)
        near = np.abs(y - middle[1] * picture.size[1])[:, None] <= _NEAR
        out[near & (np.abs(x - middle[0] * picture.size[0])[None] <= _NEAR)] = numbers
    return out.reshape(-1, 2)


@dataclass
class TokenSequence:
    """A token sequence under construction: a shared prefix and branches that see only it."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # IGNORED or the token itself
    weights: list[float] = field(default_factory=list)  # in the loss, of the tokens that are learnt
    branch: list[int] = field(default_factory=list)  # 0: prefix
    positions: list[tuple[int, int, int]] = field(default_factory=list)  # M-RoPE: t, h, w
    next_position: int = 0
    current: int = 0

    def text(self, ids: Sequence[int], weights: Sequence[float] = ()) -> None:
        """Tokens; with `weights` they are learnt."""
        p = self.next_position
        self.ids += ids
        self.labels += ids if weights else [IGNORED] * len(ids)
        self.weights += weights or [0.0] * len(ids)
        self.branch += [self.current] * len(ids)
        self.positions += [(p + k, p + k, p + k) for k in range(len(ids))]
        self.next_position += len(ids)

    def image(self, picture: Picture, pad: int) -> None:
        columns, rows = (side // (PATCH * MERGE) for side in picture.size)
        p, count = self.next_position, columns * rows
        self.ids += [pad] * count
        self.labels += [IGNORED] * count
        self.weights += [0.0] * count
        self.branch += [self.current] * count
        self.positions += [(p, p + y, p + x) for y in range(rows) for x in range(columns)]
        self.next_position += max(columns, rows)


class Encoder:
    """Turns samples into sequences of the chat template's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self._answers = 0  # in JSON
        self.image_pad = int(tokenizer.token_to_id("<|image_pad|>") or 0)

    def _ids(self, text: str) -> list[int]:
        """Text between special tokens, or ending with one, splits as it does inside a prompt."""
        if text not in self._cache:
            if len(self._cache) > 200_000:
                self._cache.clear()
            self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def _images(self, sequence: TokenSequence, pictures: Sequence[Picture]) -> None:
        for picture in pictures:
            sequence.text(self._ids("<|vision_start|>"))
            sequence.image(picture, self.image_pad)
            sequence.text(self._ids("<|vision_end|>"))

    def _turn(self, sequence: TokenSequence, question: str, answer: str | Json) -> None:
        """The end of a user's message, and the answer to it."""
        sequence.text(self._ids(question))
        self._reply(sequence, answer)

    def _reply(self, sequence: TokenSequence, answer: str | Json) -> None:
        sequence.text(self._ids("<|im_end|>\n<|im_start|>assistant\n"))
        if isinstance(answer, str):
            ids = self._ids(answer + "<|im_end|>")
            sequence.text(ids, [1.0] * len(ids))
            return
        self.add_json(sequence, *answer)
        sequence.text(self._ids("<|im_end|>"), [WRITTEN])

    def add_json(self, sequence: TokenSequence, text: str, weights: Sequence[float]) -> None:
        """An answer in JSON. In every fourth a mark that opens a text is a token of its own, as a server's
        grammar asks for it behind a name after which the model would have written no text.
        """
        self._answers += 1
        split = self._answers % 4 == 0
        at = 0
        for part in re.split('(?<=":)(?=")', text) if split else [text]:
            encoded = self._tokenizer.encode(part, add_special_tokens=False)
            of_tokens = [max(weights[at + begin : at + end]) for begin, end in encoded.offsets]
            at += len(part)
            if at < len(text):
                of_tokens[-1] = 0.0  # not to be learnt
            sequence.text(encoded.ids, of_tokens)

    def branched(self, sample: Sample, system: str = "", answers: Sequence[Json] = ()) -> TokenSequence:
        """The pictures once, and after them every question alone: as many requests in one.

        `answers`: in the places of the true sentences.
        """
        out = self._opened(system)
        self._images(out, sample.pictures)
        start = out.next_position
        for number, turn in enumerate(sample.turns, 1):
            out.current, out.next_position = number, start
            self._turn(out, turn.question, answers[number - 1] if answers else turn.answer)
        return out

    def called(self, sample: Sample, call: ToolCall, form: str) -> TokenSequence:
        """One question that a tool is called for; `form`: an object, a list, or "tagged" after a mark."""
        out = self._opened(call.system)
        self._images(out, sample.pictures)
        text, weights = weighed_json(call.value, call.fits)
        before, after = {"object": ("", ""), "list": ("[", "]")}.get(
            form, ("<tool_call>\n", "\n</tool_call>")
        )
        marks = [1.0 if form == "tagged" and call.fits else WRITTEN] * len(before)
        weights = [*marks, *weights, *[WRITTEN] * len(after)]
        self._turn(out, sample.turns[0].question, (before + text + after, weights))
        return out

    def chained(self, sample: Sample, text_first: bool, system: str = "") -> TokenSequence:
        """One conversation of several turns; the pictures are in its first message."""
        out = self._opened(system)
        for number, turn in enumerate(sample.turns):
            if number:
                out.text(self._ids("\n<|im_start|>user\n"))
            if number == 0 and text_first:
                out.text(self._ids(turn.question))
                self._images(out, sample.pictures)
                self._reply(out, turn.answer)
                continue
            if number == 0:
                self._images(out, sample.pictures)
            self._turn(out, turn.question, turn.answer)
        return out

    def _opened(self, system: str) -> TokenSequence:
        out = TokenSequence()
        if system:
            out.text(self._ids(f"<|im_start|>system\n{system}<|im_end|>\n"))
        out.text(self._ids("<|im_start|>user\n"))
        return out

    def talk(self, question: str, answer: str | Json, system: str = "") -> TokenSequence:
        """A request without pictures."""
        out = self._opened(system)
        self._turn(out, question, answer)
        return out


@dataclass
class Batch:
    ids: torch.Tensor  # [batch, length]
    labels: torch.Tensor  # [batch, length]: the token where it is learnt, else IGNORED
    weights: torch.Tensor  # [batch, length]: of the learnt tokens in the loss
    mask: torch.Tensor  # [batch, 1, length, length] bool: what each token sees
    positions: torch.Tensor  # [3, batch, length]
    pixels: torch.Tensor  # [patches, 1536]
    grid: torch.Tensor  # [images, 3] in patches
    seen: torch.Tensor  # [image tokens, 2]: colour and shape numbers, or IGNORED


def _rows(sequences: Sequence[TokenSequence], length: int) -> list[list[int]]:
    """Indices of sequences that share a row of at most `length` tokens, longest first."""
    rows: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(sequences)), key=lambda k: -len(sequences[k].ids)):
        need = len(sequences[k].ids)
        row = next((r for r, left in enumerate(room) if left >= need), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(k)
        room[row] -= need
    return rows


def collate(samples: Sequence[tuple[TokenSequence, Sequence[Picture]]], pad: int) -> Batch:
    """Packs sequences with their pictures into rows; none sees another."""
    sequences = [sequence for sequence, _ in samples]
    rows = _rows(sequences, max(_ROW_LENGTH, *(len(s.ids) for s in sequences)))
    length = max(sum(len(sequences[k].ids) for k in row) for row in rows)
    size = (len(rows), length)
    ids, labels = np.full(size, pad), np.full(size, IGNORED)
    owner, branch = np.full(size, -1), np.full(size, 0)
    weights = np.zeros(size, dtype=np.float32)
    positions = np.zeros((3, *size), dtype=np.int64)
    pictures: list[Picture] = []
    for r, row in enumerate(rows):
        start = 0
        for k in row:
            s, span = sequences[k], slice(start, start + len(sequences[k].ids))
            ids[r, span], labels[r, span], branch[r, span], owner[r, span] = (
                s.ids,
                s.labels,
                s.branch,
                k,
            )
            weights[r, span] = s.weights
            positions[:, r, span] = np.array(s.positions).T
            pictures += samples[k][1]
            start = span.stop
    shared = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    shared &= owner[:, None, :] == owner[:, :, None]
    mask = shared & np.tri(length, dtype=bool)[None]
    grid = [[1, p.size[1] // PATCH, p.size[0] // PATCH] for p in pictures]
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(labels),
        torch.from_numpy(weights),
        torch.from_numpy(mask)[:, None],
        torch.from_numpy(positions),
        torch.from_numpy(np.concatenate([picture_patches(p) for p in pictures])),
        torch.tensor(grid),
        torch.from_numpy(np.concatenate([seen_in_tokens(p) for p in pictures])),
    )


def _several(rng: random.Random, progress: float) -> int:
    """Images in a sample: one in the first part of the run, then more and more often several."""
    several = min(1.0, max(0.0, (progress - _ONE_IMAGE_PART) / _MIXING_PART))
    if rng.random() < 1 - 0.55 * several:
        return 1
    return rng.choices((2, 3, 4), (0.8, 0.12, 0.08))[0]


def _structured(
    rng: random.Random, encoder: Encoder, branches: int, split: str = "train"
) -> tuple[TokenSequence, Sequence[Picture]]:
    """A sequence of answers in JSON: of objects, or of one call of a tool."""
    if rng.random() < 0.06:
        question, answer = rng.choice(SMALL_TALK)
        if rng.random() < 0.75:
            question, answer = random_sample(rng, split, 1, 1).turns[0].question, NO_IMAGE
        if rng.random() < 0.3:
            call = drawn_call(rng, None, (), answer, split)
            text, weights = weighed_json(call.value, call.fits)
            if rng.random() < 0.5:
                text, weights = f"[{text}]", [WRITTEN, *weights, WRITTEN]
            return encoder.talk(question, (text, weights), call.system), ()
        value = value_of(drawn_fields(rng, None, (), answer, split))
        return encoder.talk(question, weighed_json(value)), ()
    images = rng.choices((1, 2, 3, 4), (0.7, 0.25, 0.03, 0.02))[0]
    if rng.random() < 0.25:
        sample = random_sample(rng, split, images, 1)
        turn = sample.turns[0]
        call = drawn_call(rng, turn.query, sample.scenes, turn.answer, split)
        return encoder.called(sample, call, rng.choice(("object", "list", "tagged"))), sample.pictures
    sample = random_sample(rng, split, images, branches)
    values = [
        weighed_json(value_of(drawn_fields(rng, turn.query, sample.scenes, turn.answer, split)))
        for turn in sample.turns
    ]
    return encoder.branched(sample, answers=values), sample.pictures


def structured_batch(rng: random.Random, encoder: Encoder, size: int, pad: int) -> Batch:
    """`size` held-out sequences of one answer in JSON each."""
    return collate([_structured(rng, encoder, 1, "held_out") for _ in range(size)], pad)


def training_batch(
    rng: random.Random, encoder: Encoder, size: int, branches: int, progress: float, pad: int
) -> Batch:
    """`size` sequences of the training split, ~`branches` answers each; `progress` is 0..1."""
    samples: list[tuple[TokenSequence, Sequence[Picture]]] = []
    for _ in range(size):
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.12 else ""
        if rng.random() < _STRUCTURED_PART:
            samples.append(_structured(rng, encoder, branches))
            continue
        kind = rng.random()
        if kind < 0.01:
            asked = rng.choice(SMALL_TALK)
            if rng.random() < 0.5:
                question = random_sample(rng, "train", 1, 1).turns[0].question
                asked = (question, NO_IMAGE)
            samples.append((encoder.talk(*asked, system), ()))
            continue
        chained = kind < 0.25
        sample = random_sample(rng, "train", _several(rng, progress), 3 if chained else branches)
        if chained:
            sequence = encoder.chained(sample, rng.random() < 0.7, system)
        else:
            sequence = encoder.branched(sample, system)
        samples.append((sequence, sample.pictures))
    return collate(samples, pad)
