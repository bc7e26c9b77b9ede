"""Segments of a video: groups of its frames that are items of their own, where the tower allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from triptych.base.errors import InvalidRequest
from triptych.base.types import Options
from triptych.base.vllm_classes import GRIDS
from triptych.models.base import PreparedItem
from triptych.models.generic.processor import GenericProcessor, ProcessedItem
from triptych.models.video.clip import Clip, ClipInfo, SegmentEnds

#: Widths and heights of the frames of the trial: in one of them two frames get the size of four.
_SIDES = (64, 32, 224)
#: Differences, by the largest value of a row, that come from the shape of a batch alone.
_TOLERANCE = {torch.float32: 1e-4}
_COARSE = 0.05


@dataclass(slots=True)
class OutlineClip:
    """A video of a known size without pixels: processors compute shapes and placeholders of it."""

    info: ClipInfo
    indices: Sequence[int] = ()

    def frames(self, indices: Sequence[int]) -> Any:
        self.indices = indices
        shape = (len(indices), self.info.height, self.info.width, 3)
        return torch.empty(shape, dtype=torch.uint8, device="meta")


@dataclass(frozen=True, slots=True)
class ClipSegment:
    """Some frames as an item: `options` prepare their pixels at the size that they have in the clip.

    `extra_rows` are dropped behind the tower's rows, but for the last segment.
    """

    start: int
    tokens: slice
    last: bool
    options: Options
    extra_rows: int


class ClipOutline:
    """A clip as its processor would prepare it. InvalidRequest where it cannot be divided by frames."""

    def __init__(
        self,
        processor: GenericProcessor,
        info: ClipInfo,
        options: Options,
        extra_rows: int,
        row_tokens: frozenset[int],
    ) -> None:
        clip = OutlineClip(info)
        self._processor, self._info, self._options = processor, info, options
        self.item = processor.video(clip, options)
        self.indices, self.frames, self.extra_rows = clip.indices, len(clip.indices), extra_rows
        #: Frames that the tower takes as one.
        self._unit = processor.frames_per_unit
        self._rows = [at for at, token in enumerate(self.item.tokens) if token in row_tokens]
        units = self._units(self.frames)
        self._rows_per_unit, remainder = divmod(len(self._rows) - extra_rows, units)
        if remainder or self._rows_per_unit < 1:
            raise InvalidRequest("video: its frames have different numbers of rows", param="video")

    def ends(self, frames: int) -> SegmentEnds:
        """Where segments of this many frames end; empty for a clip that is one item."""
        size = max(frames - frames % self._unit, self._unit)
        ends = [*range(size, self.frames, size), self.frames]
        for start, end in zip([0, *ends], ends, strict=False):
            self.segment(start, end)
        # The next segment begins there: what is between two sampled frames belongs to the first one.
        numbers = [*self.indices, self._info.frames]
        return [(end, numbers[end] / self._info.fps) for end in ends] if len(ends) > 1 else []

    def segment(self, start: int, end: int) -> ClipSegment:
        """InvalidRequest for frames that are no segment of the clip."""
        last = end == self.frames
        if not 0 <= start < end <= self.frames or start % self._unit or (end % self._unit and not last):
            raise InvalidRequest("video: no segment of it", param="video")
        first, behind = (self._units(at) * self._rows_per_unit for at in (start, end))
        begin = self._rows[first - 1] + 1 if start else 0
        stop = len(self.item.tokens) if last else self._rows[behind - 1] + 1
        options = next(filter(lambda given: self._fits(given, start, end), self._sizes(start, end)), None)
        if options is None:
            raise InvalidRequest("video: its frames depend on their number", param="video")
        return ClipSegment(start, slice(begin, stop), last, options, 0 if last else self.extra_rows)

    def cut(self, segment: ClipSegment, grids: bool) -> ProcessedItem:
        """The clip's placeholder within the segment; with its `grids`, or without."""
        item = self.item
        tensors = {name: x for name, x in item.tensors.items() if x.device.type != "meta"}
        return ProcessedItem(
            () if segment.start else item.head,
            item.tokens[segment.tokens],
            item.tail if segment.last else (),
            item.types[segment.tokens],
            tensors if grids else {},
        )

    def _units(self, frames: int) -> int:
        return -(-frames // self._unit)

    def _sizes(self, start: int, end: int) -> list[Options]:
        """Options under which fewer frames may get the size that they have in the clip."""
        limits = self._processor.video_size(self._options)
        if not limits:
            return [self._options]
        minimum, maximum = limits["shortest_edge"], limits["longest_edge"]
        part, whole = end - start, self.frames
        low, high = minimum * part // whole, maximum * part // whole
        up = (-(-minimum * part // whole), -(-maximum * part // whole))
        sizes = [(low, up[1]), (low, high), (low, maximum), (up[0], maximum)]
        edges = ({"shortest_edge": a, "longest_edge": b} for a, b in sizes)
        return [self._options, *({**self._options, "size": size} for size in edges)]

    def _fits(self, options: Options, start: int, end: int) -> bool:
        try:
            part = self._processor.video(OutlineClip(self._info), options, slice(start, end))
        except InvalidRequest:
            return False
        whole, units = self.item.tensors, self._units(end) - self._units(start)
        return part.tensors.keys() == whole.keys() and all(
            tensor[0, 1:].equal(whole[name][0, 1:]) and int(tensor[0, 0]) == units
            if name in GRIDS
            else tensor.device.type != "meta"
            or tensor.numel() * self._units(self.frames) == whole[name].numel() * units
            for name, tensor in part.tensors.items()
        )


@dataclass(frozen=True, slots=True)
class _Frames:
    """A video of single-coloured frames."""

    levels: Sequence[int]
    side: int

    @property
    def info(self) -> ClipInfo:
        return ClipInfo(len(self.levels), 2.0, self.side, self.side)

    def frames(self, indices: Sequence[int]) -> np.ndarray:
        levels = np.array([self.levels[index] for index in indices], np.uint8)[:, None, None, None]
        return np.broadcast_to(levels, (len(levels), self.side, self.side, 3)).copy()


def measured_extra_rows(
    prepare: Callable[[Clip, Options], PreparedItem], encode: Callable[[PreparedItem], torch.Tensor]
) -> int | None:
    """Rows that a tower adds behind those of the frames; None where two frames depend on the two beside them.

    By a trial: NaN in the pixels of two frames spreads over all that is computed of them. And two frames have
    to get the rows that they have behind two others: none that depend on their place.
    """

    side = _SIDES[0]

    def item(*levels: int) -> PreparedItem:
        return prepare(_Frames(levels, side), {"num_frames": len(levels)})

    try:
        for side in _SIDES:  # noqa: B007 # `item` reads it
            four, two = item(0, 0, 255, 255), item(255, 255)
            if four.cost == 2 * two.cost:
                break
        whole, alone = encode(four), encode(two)
        count = len(whole) - len(alone)
        extra = len(alone) - count
        if extra and not four.apart:
            return None
        if count < 1 or extra < 0 or four.rows != len(whole) or two.rows != len(alone):
            return None
        late = encode(_poisoned(four, item(0, 0, 9, 9)))[:count]
        early = encode(_poisoned(four, item(9, 9, 255, 255)))[count : 2 * count]
    except (InvalidRequest, ValueError, TypeError, RuntimeError, IndexError):
        return None
    rows, same = whole[count : 2 * count].float(), alone[:count].float()
    allowed = _TOLERANCE.get(whole.dtype, _COARSE) * float(rows.abs().max())
    apart = bool(torch.isfinite(late).all() and torch.isfinite(early).all())
    return extra if apart and float((rows - same).abs().max()) <= allowed else None


def _poisoned(item: PreparedItem, other: PreparedItem) -> PreparedItem:
    """The item with NaN wherever another one, of which some frames differ, has other values."""
    tensors = {
        name: torch.where(x != other.tensors[name], torch.nan, x) if x.is_floating_point() else x
        for name, x in item.tensors.items()
    }
    return replace(item, tensors=tensors)
