"""Files that are almost pictures: a picture, or a refusal in words of ours, never anything else."""

from __future__ import annotations

import io
import re
import warnings

import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.hostile.fuzzing import Fuzzer, json_values, mutated
from triptych.base.errors import InvalidRequest
from triptych.encoder_worker.media.formats import FORMATS
from triptych.encoder_worker.media.preparer import Preparer, VerifiedMedia
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder

MAX_PIXELS = 1 << 16


def files() -> list[bytes]:
    """A small file of every format and of several modes, with EXIF, palettes, alpha and frames."""
    image = picture(1, 24, 16)
    exif = Image.Exif()
    exif[0x0112] = 6
    made = []
    for format in FORMATS:
        for mode in ("RGB", "RGBA", "P", "L", "1", "CMYK", "I;16"):
            for options in ({}, {"exif": exif}, {"save_all": True, "append_images": [image]}):
                out = io.BytesIO()
                try:
                    image.convert(mode).save(out, format, **options)
                except (OSError, ValueError, TypeError, KeyError, RuntimeError):
                    continue
                made.append(out.getvalue())
    return sorted(set(made))


@pytest.fixture(scope="module", params=["qwen3_vl", "llava"])
def encoder(request: pytest.FixtureRequest) -> EncoderSide:
    torch.set_num_threads(1)
    return load_encoder(build_checkpoint(request.param), device=torch.device("cpu"), dtype=torch.float32)


def prepared(preparer: Preparer, media: bytes, options: dict[str, object]) -> None:
    """Passes, or is refused in words without the decoder's own."""
    try:
        # Outside of tests a warning is no error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            item = preparer._prepare(VerifiedMedia(media, options))
        assert item.rows > 0
        assert item.nbytes < 1 << 26
    except InvalidRequest as refused:
        assert not re.search(r"\b0x[0-9a-f]{6}", refused.message), refused.message
        assert len(refused.message) < 500, refused.message


def test_mutated_pictures_become_pixels_or_a_refusal(encoder: EncoderSide, fuzzer: Fuzzer) -> None:
    preparer = Preparer(encoder, max_pixels=MAX_PIXELS, threads=1)
    originals = files()
    assert len(originals) > 20
    fuzzer.run("media bytes", mutated(originals), lambda media: prepared(preparer, media, {}), 80)
    preparer.close()


def test_any_options_become_pixels_or_a_refusal(encoder: EncoderSide, fuzzer: Fuzzer) -> None:
    preparer = Preparer(encoder, max_pixels=MAX_PIXELS, threads=1)
    names = ["size", "min_pixels", "max_pixels", "do_resize", "resample", "image_mean", "do_center_crop"]
    names += ["patch_size", "merge_size", "crop_size", "return_tensors", "images", "device", "do_normalize"]
    sizes = st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from([0, -1, 1, 28, 300, 1 << 20, 1 << 40, 1.5, "x", None, True])
            for name in ("shortest_edge", "longest_edge", "height", "width", "max_pixels")
        },
    )
    options = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), sizes | json_values(), max_size=3)
    media = files()[0]
    fuzzer.run("processor options", options, lambda some: prepared(preparer, media, some), 40)
    preparer.close()
