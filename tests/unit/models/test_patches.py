"""Patches of 8-bit levels and the table give the bits of the checkpoint's own image processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from triptych.base.errors import InvalidRequest
from triptych.models.patch_recipe import PatchRecipe

CPU = torch.device("cpu")
#: Settings of Qwen2.5-VL, of Qwen3-VL, and some of nobody.
SETTINGS = {
    "qwen2_5_vl": {"size": {"shortest_edge": 3136, "longest_edge": 200_000}},
    "qwen3_vl": {
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 65536, "longest_edge": 1 << 20},
    },
    "bilinear, one frame": {"resample": 2, "temporal_patch_size": 1, "patch_size": 8},
}


def photo(width: int, height: int) -> Image.Image:
    """Smooth with noise, as a photo is."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = 127 + 90 * np.sin(rows / 17 + np.arange(3)[:, None, None]) * np.cos(columns / 23)
    noise = np.random.default_rng(width * height).normal(0, 9, waves.shape)
    return Image.fromarray((waves + noise).clip(0, 255).astype(np.uint8).transpose(1, 2, 0).copy())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_equal_the_processors_cast_to_the_towers_dtype(settings, dtype):
    processor = Qwen2VLImageProcessorPil(**settings)
    recipe = PatchRecipe.of(processor)
    for size in ((640, 480), (480, 1000), (48, 31), (900, 20), (2, 300), (701, 333)):
        picture = photo(*size)
        expected = processor(images=[picture], return_tensors="pt")
        levels, grid = recipe.levels(picture)
        assert levels.dtype == torch.uint8
        assert [*grid] == expected["image_grid_thw"][0].tolist()
        assert torch.equal(recipe.values(levels, CPU, dtype), expected["pixel_values"].to(dtype))


def test_limits_of_a_request_hold() -> None:
    processor = Qwen2VLImageProcessorPil()
    recipe = PatchRecipe.of(processor)
    limits = {"shortest_edge": 3136, "longest_edge": 10_000}
    expected = processor(images=[photo(640, 480)], return_tensors="pt", size=limits)
    levels, _ = recipe.levels(photo(640, 480), limits)
    assert torch.equal(recipe.values(levels, CPU, torch.float32), expected["pixel_values"])


def test_a_shape_that_the_processor_refuses_is_refused() -> None:
    recipe = PatchRecipe.of(Qwen2VLImageProcessorPil())
    with pytest.raises(InvalidRequest, match="aspect ratio") as refused:
        recipe.levels(photo(402, 2))
    assert refused.value.param == "image"


@pytest.mark.parametrize(
    "processor",
    [
        CLIPImageProcessorPil(),
        Qwen2VLImageProcessorPil(do_resize=False),
        Qwen2VLImageProcessorPil(do_rescale=False),
        Qwen2VLImageProcessorPil(do_normalize=False),
        Qwen2VLImageProcessorPil(size={"shortest_edge": 5}),
    ],
    ids=["another processor", "no resize", "no rescale", "no normalisation", "no limit"],
)
def test_other_steps_have_no_recipe(processor: Any) -> None:
    assert PatchRecipe.of(processor) is None


def test_a_processor_that_gives_other_bits_is_used_itself(monkeypatch, caplog):
    """As a release of transformers or Pillow with another order or filter would."""
    original = Qwen2VLImageProcessorPil.patchify

    def mirrored(self: Any, image: np.ndarray, *sizes: Any, **named: Any) -> Any:
        return original(self, image[..., ::-1], *sizes, **named)

    monkeypatch.setattr(Qwen2VLImageProcessorPil, "patchify", mirrored)
    assert PatchRecipe.of(Qwen2VLImageProcessorPil()) is None
    assert "transformers' processor" in caplog.text
