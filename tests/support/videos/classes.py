"""Classes that take videos: their processors' names and settings, and checkpoints that have them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.videos.cases import VideoCase
from support.zoo.checkpoint import checkpoint, own_processor
from support.zoo.models import RECIPES


@dataclass(frozen=True)
class VideoClass:
    """A class of the recipes with its video processor; `sampling` and `options` as of a case."""

    family: str
    video_processor: str
    settings: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    #: Of the recipe.
    variation: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}ForConditionalGeneration{self.variation}"

    def checkpoint(self, folder: Path) -> Path:
        """The recipe's checkpoint with the settings of its video processor, as hubs hold them."""
        path = folder / self.family
        shutil.copytree(checkpoint(self.name), path)
        file = path / "video_preprocessor_config.json"
        file.write_text(json.dumps({"video_processor_type": self.video_processor, **self.settings}))
        return path

    def case(self, folder: Path, clip: bytes) -> VideoCase:
        own = own_processor(RECIPES[self.name])
        assert own is not None
        return VideoCase(
            self.checkpoint(folder),
            clip,
            own.processor,
            own.image_processor.removesuffix("Pil"),
            self.video_processor,
            self.sampling,
            self.options,
        )


# fmt: off
_GRID = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
         "size": {"shortest_edge": 256, "longest_edge": 8192}, "cap_pixels_per_frame": False}
_SQUARE = {"size": {"height": 16, "width": 16}}
_FOUR = {"num_frames": 4}
_RATED = {"fps": 2.0}
_QWEN = ("Qwen2VLVideoProcessor", _GRID, _RATED)

CLASSES = (
    VideoClass("Qwen2_5_VL", *_QWEN),
    VideoClass("Qwen3VL", "Qwen3VLVideoProcessor", _GRID),
    VideoClass("Qwen3_5", "Qwen3VLVideoProcessor", _GRID),
    VideoClass("LlavaOnevision", "LlavaOnevisionVideoProcessor", _SQUARE, _FOUR, _FOUR),
    VideoClass("InternVL", "InternVLVideoProcessor", _SQUARE, _FOUR, _FOUR),
    VideoClass("Qwen2VL", *_QWEN),
    VideoClass("Qwen3VLMoe", "Qwen3VLVideoProcessor", _GRID),
    VideoClass("Qwen3_5Moe", "Qwen3VLVideoProcessor", _GRID),
    VideoClass("SmolVLM", "SmolVLMVideoProcessor",
               {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}, **_RATED, **_FOUR}),
    VideoClass("VideoLlama3", "VideoLlama3VideoProcessor",
               {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 1, "size": _GRID["size"]}, _RATED),
    VideoClass("LlavaNextVideo", "LlavaNextVideoVideoProcessor",
               {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}, _FOUR, _FOUR),
    VideoClass("Gemma4", "Gemma4VideoProcessor", {"patch_size": 4, "pooling_kernel_size": 2}, _FOUR, _FOUR,
               "-per-layer-inputs"),
    VideoClass("Glm4v", "Glm4vVideoProcessor", _GRID),
    VideoClass("Glm4vMoe", "Glm4vVideoProcessor", _GRID),
    VideoClass("Glm46V", "Glm46VVideoProcessor", _GRID),
)
# fmt: on
