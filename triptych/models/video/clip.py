"""A video file, and the frames of it that a checkpoint's processor samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from triptych.base.errors import InvalidRequest
from triptych.base.types import Options

#: Frames that are sampled where the processor has no sampling of its own.
DEFAULT_FRAMES = 32
#: Frames per second where the processor bounds frames but names no rate.
DEFAULT_FPS = 2.0
#: Largest number of frames that an option may ask for where the checkpoint has no limit.
MAX_FRAMES = 768
_MAX_FPS = 120.0
#: Options of sampling. No other options of a request reach the sampling.
SAMPLING = ("fps", "num_frames", "min_frames", "max_frames")


@dataclass(frozen=True, slots=True)
class ClipInfo:
    """What a video file's index says: `frames` may be decoded, upright they are width x height."""

    frames: int
    fps: float
    width: int
    height: int


#: The sampled frames at which a video's segments end, each with the seconds of the video there.
SegmentEnds = list[tuple[int, float]]


class Clip(Protocol):
    """A video file, decoded on demand."""

    @property
    def info(self) -> ClipInfo:
        """InvalidRequest for what is no video."""
        ...

    def frames(self, indices: Sequence[int]) -> np.ndarray:
        """uint8 [len(indices), height, width, 3], RGB, of ascending indices."""
        ...


def check_sampling(processor: Any, options: Options) -> None:
    """InvalidRequest, naming the option, for one of another kind or above the checkpoint's limit."""
    largest = getattr(processor, "max_frames", None) or MAX_FRAMES
    limits = {"fps": _MAX_FPS, **dict.fromkeys(SAMPLING[1:], largest)}
    for name in options.keys() & limits.keys():
        value, kinds = options[name], (int, float) if name == "fps" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= limits[name]:
            raise InvalidRequest(
                f"mm_processor_kwargs option {name!r} must be above 0 and at most {limits[name]:g}",
                param=f"mm_processor_kwargs.{name}",
            )
    if "fps" in options and "num_frames" in options:
        raise InvalidRequest("give fps or num_frames, not both", param="mm_processor_kwargs.fps")


def sampled_indices(
    processor: Any, metadata: Any, defaults: Mapping[str, Any], options: Options
) -> list[int]:
    """The frames that the processor samples of a clip, as its own call would choose them."""
    own = {name: getattr(processor, name, None) for name in processor.valid_kwargs.__annotations__}
    settings = {**own, **{name: value for name, value in defaults.items() if name in own}}
    for name in ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"):
        settings.pop(name, None)
    given = {name: options[name] for name in SAMPLING if name in options}
    own_fps, own_count = settings.get("fps"), settings.get("num_frames")
    # Processors take one of the two, unless they have both.
    if ("fps" in given or "num_frames" in given) and (own_fps is None or own_count is None):
        settings |= {"fps": None, "num_frames": None}
    elif own_fps is None and own_count is None:
        rated = getattr(processor, "max_frames", None) is not None
        given |= {"fps": DEFAULT_FPS} if rated else {"num_frames": DEFAULT_FRAMES}
    if given.get("num_frames") is not None:
        given["num_frames"] = min(given["num_frames"], metadata.total_num_frames)
    indices = processor.sample_frames(metadata=metadata, **(settings | given))
    chosen = [int(index) for index in indices]
    limit = getattr(processor, "max_frames", None) or MAX_FRAMES
    if not chosen or len(chosen) > limit:
        raise InvalidRequest(
            f"video: {len(chosen)} frames of {metadata.total_num_frames} would be sampled, at least 1 and at "
            f"most {limit} can be: give another fps or num_frames",
            param="mm_processor_kwargs",
        )
    return chosen
