"""Limits on the items of a prompt (--limit-mm-per-prompt), and the embeddings of a prompt within them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from PIL import Image

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import prepared
from triptych.models.video.clip import MAX_FRAMES, ClipInfo

if TYPE_CHECKING:
    from triptych.models.base import DecoderSide
    from triptych.models.generic.processor import GenericProcessor

_Count = Annotated[int, msgspec.Meta(ge=0, le=4096)]
_Side = Annotated[int, msgspec.Meta(ge=1, le=8192)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_Frames = Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAMES)]
#: Frames of a profiled video are half a second apart.
_FPS = 2.0


class ItemLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The maximum number of items of one modality, and the size of the largest one, for profiling."""

    count: _Count = 1
    width: _Side | None = None
    height: _Side | None = None
    num_frames: _Frames | None = None
    seconds: _Seconds | None = None


#: Items by which the densest of a modality is found: of larger ones markers are a smaller part.
_USUAL = {
    "image": tuple(ItemLimit(1, side, side) for side in (64, 448, 1024)),
    "video": tuple(ItemLimit(1, side, side, 4) for side in (64, 448, 1024)),
    "audio": (ItemLimit(1, seconds=1.0), ItemLimit(1, seconds=30.0)),
}


def parse_item_limits(text: str) -> dict[str, ItemLimit]:
    """The limits by modality, of JSON as vLLM's flag takes it; ConfigError for anything else."""
    try:
        kinds = dict[Literal["image", "video", "audio"], _Count | ItemLimit]
        given = msgspec.json.decode(text or "{}", type=prepared(kinds))
    except msgspec.DecodeError as error:
        example = '{"image": 0, "video": {"count": 1, "num_frames": 32, "width": 448, "height": 448}}'
        raise ConfigError(f"--limit-mm-per-prompt: {error}; write it like {example}") from None
    return {name: ItemLimit(limit) if isinstance(limit, int) else limit for name, limit in given.items()}


def max_embeddings(limits: Mapping[str, ItemLimit], decoder: DecoderSide, path: Path, tokens: int) -> int:
    """The maximum number of embeddings of a prompt of `tokens` tokens.

    Placeholder tokens without an embedding, such as timestamps and ends of rows, are not counted. Where the
    limits give no size of the largest item, a prompt is full of the modality's densest items.
    """
    # With torch, which reading the limits does not need.
    from triptych.models.generic.processor import GenericProcessor

    known = {name: limits.get(name) for name in decoder.modalities}
    if not decoder.token_ids:
        return tokens
    try:
        processor = GenericProcessor(path, decoder.token_ids, ())
    except ConfigError:
        if limits:
            raise
        return tokens  # a PD worker needs none, but to tell how dense items are
    rows, share, sized = 0, 0.0, True
    for modality, limit in known.items():
        if limit is not None and not limit.count:
            continue
        if limit is not None and _is_sized(modality, limit):
            placeholder = _placeholder(processor, modality, limit)
            found = sum(token in decoder.row_token_ids for token in placeholder)
            rows += limit.count * found
            share = max(share, found / max(len(placeholder), 1))
        else:
            sized = False
            share = max(share, _densest(processor, modality, decoder.row_token_ids))
    return min(tokens, rows if sized else math.ceil(tokens * share))


def _densest(processor: GenericProcessor, modality: str, row_token_ids: Collection[int]) -> float:
    """The greatest share of an item's tokens that have an embedding, among items of usual sizes."""
    shares = []
    for limit in _USUAL[modality]:
        try:
            placeholder = _placeholder(processor, modality, limit)
        except ConfigError:
            continue  # too small or too large for the class
        if placeholder:
            shares.append(sum(token in row_token_ids for token in placeholder) / len(placeholder))
    return max(shares, default=1.0)


def _is_sized(modality: str, limit: ItemLimit) -> bool:
    if modality == "audio":
        return limit.seconds is not None
    return None not in (limit.width, limit.height) and (modality != "video" or limit.num_frames is not None)


def _placeholder(processor: GenericProcessor, modality: str, limit: ItemLimit) -> Sequence[int]:
    from triptych.models.audio import Silence

    width, height = limit.width or 1, limit.height or 1
    try:
        if modality == "audio":
            return processor.sound(Silence(limit.seconds or 1), {}).tokens
        if modality == "image":
            return processor(Image.new("RGB", (width, height)), {}).tokens
        clip = _BlankClip(ClipInfo(limit.num_frames or 1, _FPS, width, height))
        return processor.video(clip, {"num_frames": clip.info.frames}).tokens
    except InvalidRequest as error:
        raise ConfigError(f"--limit-mm-per-prompt: {modality}: {error.message}") from error


@dataclass(frozen=True, slots=True)
class _BlankClip:
    """A black video, for its placeholder."""

    info: ClipInfo

    def frames(self, indices: Sequence[int]) -> np.ndarray:
        return np.zeros((len(indices), self.info.height, self.info.width, 3), dtype=np.uint8)
