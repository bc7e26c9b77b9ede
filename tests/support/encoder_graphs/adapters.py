"""Every family's tower on fixed-shape buffers, with media of mixed sizes for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.data.sounds import Sound, sound
from support.encoder_graphs.two_towers import TwoTowerEncoder
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.registry import load_encoder

_SIDES = ((96, 64), (32, 32), (64, 128), (48, 64), (160, 96))
_WORDS = (9, 1, 14, 4, 22)


def _picture(number: int) -> Media:
    return picture(number, *_SIDES[number % len(_SIDES)])


def _small_picture(number: int) -> Media:
    """Every fourth, the first among them, is one piece of the toy with two towers: it is not cut."""
    return picture(number, 16 * (1 + number % 4), 16)


def _sound(number: int) -> Media:
    return Sound(sound(0.4 + 0.3 * (number % 5), seed=number))


def _text(number: int) -> Media:
    return ("a calm sea " * _WORDS[number % len(_WORDS)] + str(number)).encode()


@dataclass(frozen=True)
class Adapter:
    """A family: how its encoder is opened (on a device, in a dtype), and its n-th medium."""

    name: str
    open: Callable[..., EncoderSide]
    medium: Callable[[int], Media]

    def items(self, encoder: EncoderSide, count: int, first: int = 0) -> list[PreparedItem]:
        return [encoder.preprocess(self.medium(number), {}) for number in range(first, first + count)]


@functools.cache
def _loaded(family: str, variant: str, device: str, dtype: torch.dtype) -> EncoderSide:
    path = build_checkpoint(family, variant=variant)
    return load_encoder(path, device=torch.device(device), dtype=dtype)


def _family(name: str, medium: Callable[[int], Media], variant: str = "") -> Adapter:
    def opened(device: str = "cpu", dtype: torch.dtype = torch.float32) -> EncoderSide:
        return _loaded(name, variant, device, dtype)

    return Adapter(name, opened, medium)


ADAPTERS = (
    _family("qwen3_vl", _picture),
    _family("qwen2_5_vl", _picture),
    _family("llava", _picture),
    _family("bart", _text),
    _family("mbart", _text),
    _family("t5", _text),
    _family("trocr", _picture),
    _family("whisper", _sound, "small"),
    Adapter("two_towers", TwoTowerEncoder, _small_picture),
)
