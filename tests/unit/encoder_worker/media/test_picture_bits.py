"""From file to pixel values: the bits of Pillow and transformers' processor, by every way there is."""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from triptych.encoder_worker.media import jpeg
from triptych.encoder_worker.media.formats import decode_image
from triptych.kernels.functions import PictureKernel
from triptych.models.level_steps import on_levels
from triptych.models.patch_recipe import PatchRecipe

CPU = torch.device("cpu")


def photo(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    waves = 127 + 90 * np.sin(rows / 17 + np.arange(4)[:, None, None]) * np.cos(columns / 23)
    noise = np.random.default_rng(width * height).normal(0, 9, waves.shape)
    pixels = (waves + noise).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(pixels)).convert(mode)


def file_of(picture: Image.Image, kind: str, **settings: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **settings)
    return out.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(photo(70, 40), "JPEG", exif=exif)


FILES: dict[str, bytes] = {
    "height shrinks over twice as much as width": file_of(photo(420, 1400), "JPEG"),
    "width shrinks": file_of(photo(1400, 420), "JPEG"),
    "enlarged": file_of(photo(9, 7), "PNG"),
    "one pixel wide": file_of(photo(1, 150), "PNG"),
    "one pixel high": file_of(photo(150, 1), "JPEG"),
    "grey JPEG": file_of(photo(97, 61, "L"), "JPEG"),
    "grey PNG": file_of(photo(97, 61, "L"), "PNG"),
    "alpha": file_of(photo(120, 90, "RGBA"), "PNG"),
    "palette": file_of(photo(120, 90).convert("P"), "PNG"),
    "JPEG 4:4:4": file_of(photo(201, 133), "JPEG", subsampling=0),
    "JPEG 4:2:2": file_of(photo(201, 133), "JPEG", subsampling=1),
    "JPEG 4:2:0": file_of(photo(201, 133), "JPEG", subsampling=2),
    "progressive": file_of(photo(201, 133), "JPEG", progressive=True),
    "JPEG in RGB": file_of(photo(201, 133), "JPEG", keep_rgb=True),
    "CMYK": file_of(photo(60, 50, "CMYK"), "JPEG"),
    "WebP": file_of(photo(133, 201), "WEBP"),
    "lossless WebP": file_of(photo(133, 201), "WEBP", lossless=True),
    "GIF": file_of(photo(64, 100), "GIF"),
    **{f"EXIF orientation {orientation}": turned(orientation) for orientation in (2, 3, 5, 6, 7, 8)},
}
_SQUARE = {"size": {"height": 56, "width": 56}}
#: Class, module and settings of processors of each kind: patches, shortest edge and crop, fixed size, tiles.
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3-VL": (
        "Qwen2VL",
        "qwen2_vl",
        {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 1 << 17}},
    ),
    "Qwen2.5-VL": ("Qwen2VL", "qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 200_000}}),
    "CLIP": ("CLIP", "clip", {}),
    "LLaVA that pads": ("Llava", "llava", {"do_pad": True}),
    "SigLIP": ("Siglip", "siglip", {}),
    "Gemma 3": ("Gemma3", "gemma3", _SQUARE),
    "InternVL": ("GotOcr2", "got_ocr2", {**_SQUARE, "crop_to_patches": True}),
    "LLaVA-NeXT": (
        "LlavaNext",
        "llava_next",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    ),
    "SmolVLM": (
        "SmolVLM",
        "smolvlm",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
    ),
    "Pixtral": ("Pixtral", "pixtral", {"size": {"longest_edge": 160}}),
}


@functools.cache
def processor(name: str) -> Any:
    cls, module, settings = PROCESSORS[name]
    imported = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(imported, f"{cls}ImageProcessorPil")(**settings)


@functools.cache
def prepared_by_transformers(name: str, file: str) -> dict[str, torch.Tensor]:
    picture = load_image(Image.open(io.BytesIO(FILES[file])))
    return dict(processor(name)(images=[picture], return_tensors="pt"))


@functools.cache
def ours(name: str, compiled: bool) -> Callable[[Image.Image], dict[str, torch.Tensor]]:
    """The fast path of a processor, made with the kernel or without it."""
    recipe = PatchRecipe.of(processor(name))
    if recipe is None:
        fast = on_levels(processor(name))
        assert fast is not processor(name)
        return lambda picture: dict(fast(images=[picture], return_tensors="pt"))
    assert recipe.compiled == compiled

    def prepared(picture: Image.Image) -> dict[str, torch.Tensor]:
        levels, grid = recipe.levels(picture)
        values = recipe.values(levels, CPU, torch.float32)
        return {"pixel_values": values, "image_grid_thw": torch.tensor([grid])}

    return prepared


@pytest.fixture(params=["compiled", "Pillow and numpy"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether kernel and simplejpeg are there; the second time they are switched off."""
    off = request.param != "compiled"
    if off:
        monkeypatch.setattr(PictureKernel, "load", lambda: None)
        monkeypatch.setattr(jpeg, "_codec", lambda: None)
    yield not off and PictureKernel.load() is not None


@pytest.mark.parametrize("file", FILES)
def test_a_decoded_file_is_pillows(file: str, compiled: bool) -> None:
    expected = np.asarray(load_image(Image.open(io.BytesIO(FILES[file]))))
    decoded = decode_image(FILES[file], max_pixels=1 << 20)
    assert decoded.mode == "RGB" and decoded.size == expected.shape[1::-1]
    assert np.array_equal(np.asarray(decoded), expected)
    assert np.array_equal(np.asarray(decoded.crop((0, 0, *decoded.size))), expected)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_prepared_file_is_that_of_the_checkpoints_processor(name: str, compiled: bool) -> None:
    for file, data in FILES.items():
        actual = ours(name, compiled)(decode_image(data, max_pixels=1 << 20))
        expected = prepared_by_transformers(name, file)
        assert actual.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(torch.as_tensor(actual[key]), torch.as_tensor(tensor)), (file, key)


def test_simplejpeg_decodes_here_and_only_what_it_decodes_alike() -> None:
    by_array = {name for name, data in FILES.items() if isinstance(decoded(data), jpeg.ArrayImage)}
    jpegs = {name for name, data in FILES.items() if data.startswith(b"\xff\xd8")}
    assert by_array == jpegs - {"CMYK"}


def decoded(data: bytes) -> Image.Image:
    return decode_image(data, max_pixels=1 << 20)


def test_a_decoder_with_other_bits_is_not_used(monkeypatch, caplog):
    """As a build of libjpeg with another transform or upsampling would give."""
    import simplejpeg

    original = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda data, space: original(data, space, fastdct=True))
    jpeg._codec.cache_clear()
    try:
        assert not isinstance(decoded(FILES["JPEG 4:2:0"]), jpeg.ArrayImage)
    finally:
        jpeg._codec.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "other bits" in caplog.text


def test_a_kernel_with_other_bits_is_not_used(monkeypatch, caplog):
    original = PictureKernel.levels

    def off_by_one(self: PictureKernel, *args: Any) -> np.ndarray:
        return original(self, *args) ^ np.uint8(1)

    monkeypatch.setattr(PictureKernel, "levels", off_by_one)
    recipe, fast = PatchRecipe.of(processor("Qwen3-VL")), on_levels(processor("CLIP"))
    assert recipe is not None and not recipe.compiled
    assert type(fast).kernel is None and fast is not processor("CLIP")
    assert len(caplog.records) == (2 if PictureKernel.load() else 0)
