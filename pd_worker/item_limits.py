"""Limits on the items of a prompt (--limit-mm-per-prompt), and the embeddings of a prompt within them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from PIL import Image

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.models.audio import Silence
from triptych.models.base import DecoderSide
from triptych.models.generic.processor import GenericProcessor
from triptych.models.video.clip import MAX_FRAMES, ClipInfo

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


def parse_item_limits(text: str) -> dict[str, ItemLimit]:
    """The limits by modality, of JSON as vLLM's flag takes it; ConfigError for anything else."""
    try:
        kinds = dict[Literal["image", "video", "audio"], _Count | ItemLimit]
        given = msgspec.json.decode(text or "{}", type=kinds)
    except msgspec.DecodeError as error:
        example = '{"image": 0, "video": {"count": 1, "num_frames": 32, "width": 448, "height": 448}}'
        raise ConfigError(f"--limit-mm-per-prompt: {error}; write it like {example}") from None
    return {name: ItemLimit(limit) if isinstance(limit, int) else limit for name, limit in given.items()}


def max_embeddings(limits: Mapping[str, ItemLimit], decoder: DecoderSide, path: Path, tokens: int) -> int:
    """The maximum number of embeddings of a prompt of `tokens` tokens.

    Placeholder tokens without an embedding, such as timestamps, are not counted where the limits give the
    size of the largest item of each modality. Otherwise every token may have one.
    """
    known = {name: limits.get(name) for name in decoder.modalities}
    if not decoder.token_ids or not all(map(_is_sized, known, known.values())):
        return tokens
    processor = GenericProcessor(path, decoder.token_ids, ())
    rows = 0
    for modality, limit in known.items():
        if limit is not None and limit.count:
            placeholder = _placeholder(processor, modality, limit)
            rows += limit.count * sum(token in decoder.row_token_ids for token in placeholder)
    return min(tokens, rows)


def _is_sized(modality: str, limit: ItemLimit | None) -> bool:
    if limit is None or not limit.count:
        return limit is not None
    if modality == "audio":
        return limit.seconds is not None
    return None not in (limit.width, limit.height) and (modality != "video" or limit.num_frames is not None)


def _placeholder(processor: GenericProcessor, modality: str, limit: ItemLimit) -> Sequence[int]:
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
