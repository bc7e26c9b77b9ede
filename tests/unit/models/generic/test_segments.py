"""Which towers take a video in segments: found by a trial on towers of a few lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triptych.base.errors import InvalidRequest
from triptych.base.types import Options
from triptych.models.base import PreparedItem
from triptych.models.generic.segments import measured_extra_rows
from triptych.models.video.clip import Clip

Tower = Callable[[torch.Tensor], torch.Tensor]


def pairs(pixels: torch.Tensor) -> torch.Tensor:
    """Two rows of each pair of frames."""
    means = pixels.flatten(1).mean(1).view(-1, 2).mean(1, keepdim=True)
    return (means * torch.tensor([[1.0, 2.0, 3.0]])).repeat_interleave(2, 0)


def attending(pixels: torch.Tensor) -> torch.Tensor:
    rows = pairs(pixels)
    return torch.softmax(rows @ rows.T, -1) @ rows


def causal(pixels: torch.Tensor) -> torch.Tensor:
    return pairs(pixels).cumsum(0)


def numbered(pixels: torch.Tensor) -> torch.Tensor:
    rows = pairs(pixels)
    return rows + torch.arange(len(rows))[:, None]


def with_newline(pixels: torch.Tensor) -> torch.Tensor:
    return torch.cat([pairs(pixels), torch.ones(1, 3)])


def pooled(pixels: torch.Tensor) -> torch.Tensor:
    return pairs(pixels).mean(0, keepdim=True)


def measured(tower: Tower) -> int | None:
    def prepare(clip: Clip, options: Options) -> PreparedItem:
        assert options == {"num_frames": clip.info.frames}
        frames = clip.frames(range(clip.info.frames))
        pixels = torch.from_numpy(frames.copy()).float() / 255 + 1
        rows = len(tower(pixels))
        return PreparedItem(rows, rows, (), cost=len(pixels), tensors={"pixel_values_videos": pixels})

    return measured_extra_rows(prepare, lambda item: tower(item.tensors["pixel_values_videos"]))


@pytest.mark.parametrize(
    ("tower", "extra"),
    [(pairs, 0), (with_newline, 1), (attending, None), (causal, None), (numbered, None), (pooled, None)],
)
def test_only_a_tower_whose_frames_stand_alone_is_divided(tower: Tower, extra: int | None) -> None:
    assert measured(tower) == extra


def test_a_model_without_videos_is_not_divided() -> None:
    def refuse(clip: Clip, options: Options) -> PreparedItem:
        raise InvalidRequest("video: this model takes no videos", param="video")

    assert measured_extra_rows(refuse, lambda item: torch.zeros(1)) is None
