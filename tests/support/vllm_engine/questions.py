"""Questions with items of every kind that a class takes: as clients ask, and as the native engine answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support.data.pictures import picture
from support.data.sounds import Sound, audio_file, sound
from support.engine.engine_cell import EngineCell, engine_cell
from support.processes.cluster import data_url
from support.videos.cases import Sides, answered, plan_of
from support.videos.clips import make_clip
from triptych.base.config import MIB
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint

_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_RATE = 16_000


class Item:
    """A picture, a clip or a sound."""

    def __init__(self, media: Image.Image | bytes | np.ndarray) -> None:
        self._media = media

    @property
    def modality(self) -> str:
        kinds = {bytes: "video", np.ndarray: "audio"}
        return kinds.get(type(self._media), "image")

    @cached_property
    def _url(self) -> str:
        if isinstance(self._media, Image.Image):
            return data_url(self._media)
        kind, data = "video/mp4", self._media
        if isinstance(data, np.ndarray):
            kind, data = "audio/wav", audio_file(data, _RATE, "WAV", subtype="FLOAT")
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    @property
    def part(self) -> dict[str, Any]:
        """The part of a client's message."""
        return {"type": f"{self.modality}_url", f"{self.modality}_url": {"url": self._url}}

    def prepared(self, encoder: EncoderSide) -> PreparedItem:
        """As an encoder worker prepares it."""
        if isinstance(self._media, bytes):
            with MediaClip(self._media, VideoLimits()) as clip:
                return encoder.preprocess_video(clip, {})
        if isinstance(self._media, np.ndarray):
            return encoder.preprocess_sound(Sound(self._media), {})
        return encoder.preprocess(self._media, {})


@dataclass(frozen=True)
class Question:
    """A message: its items, and a text behind them."""

    items: tuple[Item, ...]
    text: str

    @property
    def template(self) -> list[dict[str, Any]]:
        """For chat templates."""
        return self._message([{"type": item.modality} for item in self.items])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As a client sends them."""
        return self._message([item.part for item in self.items])

    def _message(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]


def questions(count: int, modalities: Sequence[str]) -> list[Question]:
    """About five items of several sizes: alone, together, shared by questions; and texts."""
    images = [Item(picture(n, *size)) for n, size in enumerate(((32, 16), (16, 32)))]
    others = [Item(picture(3, 16, 16)), Item(picture(4, 32, 16)), Item(picture(5, 48, 32))]
    if "video" in modalities:
        clips = (
            make_clip(size=(80, 48)),
            make_clip(frames=16, size=(48, 32)),
            make_clip(frames=9, size=(32, 64)),
        )
        others = [Item(clip) for clip in clips]
    elif "image" not in modalities:
        heard = [Item(sound(seconds, seed=at)) for at, seconds in enumerate((0.83, 0.61, 0.4, 0.97, 0.5))]
        images, others = heard[:2], heard[2:]
    items = (
        (others[0],),
        (others[1],),
        (others[2],),
        (others[1], others[2]),
        (images[0], others[1]),
        (others[2], images[1]),
        (images[0], others[2], images[1]),
        (images[0],),
        (),
    )
    return [Question(items[n % len(items)], f"What happens, {n // len(items)}?") for n in range(count)]


@dataclass
class _Native:
    """The native engine over a checkpoint, and what its encoder side has made of items."""

    sides: Sides
    cell: EngineCell
    tokens: int
    _made: dict[Item, Any] = field(default_factory=dict)

    def _plan_and_rows(self, item: Item) -> Any:
        if item not in self._made:
            encoder = self.sides.encoder
            prepared = item.prepared(encoder)
            plan = plan_of(prepared, encoder.width, len(self._made))
            self._made[item] = plan, encoder.encode([prepared])[0]
        return self._made[item]

    def answer(self, question: Question) -> tuple[list[int], list[int]]:
        found = [self._plan_and_rows(item) for item in question.items]
        decoder = self.sides.decoder
        builder, _ = open_checkpoint(self.sides.path, decoder, 1024)
        prompt = builder.build(json.dumps(question.template).encode(), [plan for plan, _ in found])
        rows = [rows for _, rows in found]
        return list(prompt.token_ids), answered(self.cell, decoder, prompt, rows, self.tokens)


def native_answers(path: Path, asked: Sequence[Question], tokens: int) -> list[tuple[list[int], list[int]]]:
    """The prompt's ids and the greedy answer of each question, by an engine in this process."""
    decoder = load_decoder(path, **_CPU, attn_implementation=ATTENTION_NAME)
    sides = Sides(path, load_encoder(path, **_CPU), decoder)
    limits: dict[str, Any] = {"max_num_batched_tokens": 1024, "max_model_len": 1024}
    with engine_cell(sides, kv_memory=64 * MIB, **limits) as cell:
        native = _Native(sides, cell, tokens)
        return [native.answer(question) for question in asked]
