"""Preprocessing, and the defaults of processors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from support.data.checkpoints import FAMILIES, build_checkpoint, edit_config
from support.data.oracle import image_processor
from support.data.pictures import picture
from support.fakes.fake_cuda import fake_cuda
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import GREEDY
from triptych.models.base import EncoderSide, GenerationDefaults
from triptych.models.families.qwen import QwenEncoder
from triptych.models.images import ImageProcessor
from triptych.models.registry import generation_defaults, load_encoder, resolve_device, resolve_dtype

QWEN = ("qwen3_vl", "qwen2_5_vl")


@functools.cache
def encoder(family: str, variant: str = "") -> EncoderSide:
    path = build_checkpoint(family, variant=variant)
    return load_encoder(path, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("variant", ["", "small"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_those_of_the_checkpoints_processor(family: str, variant: str) -> None:
    processor = image_processor(build_checkpoint(family, variant=variant))
    image = picture(1, 120, 70)
    item = encoder(family, variant).preprocess(image, {})
    expected = processor(images=[image], return_tensors="pt")
    side = encoder(family, variant)
    pixels = side.pixels([item]) if isinstance(side, QwenEncoder) else item.tensors["pixel_values"]
    assert torch.equal(pixels, expected["pixel_values"])


@pytest.mark.parametrize("family", QWEN)
def test_a_prepared_picture_of_qwen_is_an_eighth_of_its_pixel_values(family: str) -> None:
    """Two frames of four bytes in place of one of one."""
    side = encoder(family)
    item = side.preprocess(picture(1, 120, 70), {})
    assert 8 * item.nbytes == side.pixels([item]).nbytes


@pytest.mark.parametrize("family", QWEN)
def test_an_image_of_qwen_is_a_grid_of_patches_merged_four_to_a_row(family: str) -> None:
    item = encoder(family).preprocess(picture(1, 96, 48), {})
    assert (item.grid_thw, item.rows, item.length, item.cost) == ((1, 6, 12), 18, 18, 72)


@pytest.mark.parametrize("family", QWEN)
def test_the_checkpoints_limit_shrinks_a_large_image(family: str) -> None:
    item = encoder(family, "small").preprocess(picture(1, 256, 256), {})
    assert item.cost * 8 * 8 <= 1024


@pytest.mark.parametrize("options", [{"max_pixels": 1024}, {"size": {"longest_edge": 1024}}])
@pytest.mark.parametrize("family", QWEN)
def test_a_request_may_shrink_an_image(family: str, options: dict[str, Any]) -> None:
    side = encoder(family)
    assert side.preprocess(picture(1, 128, 128), {}).rows == 64
    assert side.preprocess(picture(1, 128, 128), options).rows == 4


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_pixels": 10**9}, "mm_processor_kwargs.max_pixels"),
        ({"size": {"longest_edge": 10**9}}, "mm_processor_kwargs.size"),
        ({"min_pixels": 10**9}, "mm_processor_kwargs.min_pixels"),
        ({"min_pixels": 2048, "max_pixels": 1024}, "mm_processor_kwargs.min_pixels"),
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": True}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": "many"}, "mm_processor_kwargs.max_pixels"),
        ({"size": {"width": 32}}, "mm_processor_kwargs.size"),
        ({"size": 32}, "mm_processor_kwargs.size"),
        ({"patch_size": 4}, "mm_processor_kwargs.patch_size"),
        ({"colour": "red"}, "mm_processor_kwargs.colour"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(family: str, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encoder(family).preprocess(picture(1), options)
    assert refused.value.param == param


@pytest.mark.parametrize("family", QWEN)
def test_an_image_too_long_for_its_width_is_refused(family: str) -> None:
    with pytest.raises(InvalidRequest, match="aspect ratio") as refused:
        encoder(family).preprocess(Image.new("RGB", (4000, 4)), {})
    assert refused.value.param == "image"


def test_every_image_of_llava_takes_as_many_rows() -> None:
    side = encoder("llava")
    items = [side.preprocess(picture(1, *size), {}) for size in ((48, 48), (200, 20))]
    assert [(item.rows, item.length, item.grid_thw, item.cost) for item in items] == [(36, 36, (), 36)] * 2


def test_a_line_of_pixels_that_llava_would_blow_up_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="aspect ratio") as refused:
        encoder("llava").preprocess(Image.new("RGB", (100_000, 1)), {})
    assert refused.value.param == "image"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_pixels": 1024}, "mm_processor_kwargs.max_pixels"),
        ({"do_pad": True}, "mm_processor_kwargs.do_pad"),
        ({"do_resize": "yes"}, "mm_processor_kwargs.do_resize"),
        ({"crop_size": {"height": 32, "width": 32}}, "mm_processor_kwargs"),
        ({"size": {"shortest_edge": 1 << 32}}, "mm_processor_kwargs.size"),
        ({"size": {"height": 100_000, "width": 100_000}}, "mm_processor_kwargs.size"),
    ],
)
def test_llava_refuses_what_its_processor_or_tower_does_not_take(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encoder("llava").preprocess(picture(1), options)
    assert refused.value.param == param


def test_llava_takes_options_that_keep_the_towers_size() -> None:
    side, image = encoder("llava"), picture(1, 200, 100)
    stretched = side.preprocess(image, {"size": {"height": 48, "width": 48}})
    plain = side.preprocess(image, {})
    assert not torch.equal(stretched.tensors["pixel_values"], plain.tensors["pixel_values"])


def test_llava_pads_where_its_processor_does() -> None:
    side, image = encoder("llava", "small"), picture(1, 200, 100)
    padded, cropped = side.preprocess(image, {}), side.preprocess(image, {"do_pad": False})
    assert not torch.equal(padded.tensors["pixel_values"], cropped.tensors["pixel_values"])


def test_a_checkpoint_without_image_processor_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        load_encoder(path, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("named", ["Qwen2VLImageProcessorFast", "Qwen2VLImageProcessor", None])
def test_every_name_of_a_processor_means_its_pil_class(tmp_path: Path, named: str | None) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_processor_type": named}))
    assert ImageProcessor(path).config["backend"] == "pil"
    assert ImageProcessor(path).get("patch_size") == 8


def test_an_unknown_image_processor_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    edit_config(path, "preprocessor_config.json", image_processor_type="Odd")
    with pytest.raises(ConfigError, match="image processor cannot be loaded"):
        ImageProcessor(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_do_sample_is_greedy(family: str) -> None:
    path = build_checkpoint(family)
    eos = AutoTokenizer.from_pretrained(path).eos_token_id
    found = generation_defaults(path)
    assert (found.eos_token_ids, found.sampling) == ((eos,), GREEDY)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_values_and_a_list_of_eos_are_read(family: str) -> None:
    path = build_checkpoint(family, variant="list_eos+sampling")
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = generation_defaults(path)
    assert found.eos_token_ids == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.top_k) == (0.7, 0.8, 20)


def test_without_generation_config_the_models_eos_counts(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    expected = generation_defaults(path).eos_token_ids
    (path / "generation_config.json").unlink()
    found = generation_defaults(path)
    assert found.eos_token_ids == expected
    assert found == GenerationDefaults(eos_token_ids=expected)


@pytest.mark.parametrize(("sampled", "min_p"), [(True, 0.2), (False, 0.0)])
def test_a_repetition_penalty_counts_without_sampling_and_min_p_does_not(tmp_path, sampled, min_p):
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    values = {"eos_token_id": 3, "do_sample": sampled, "min_p": 0.2, "repetition_penalty": 1.05}
    (path / "generation_config.json").write_text(json.dumps(values))
    found = generation_defaults(path)
    assert (found.sampling.repetition_penalty, found.sampling.min_p) == (1.05, min_p)


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda:1", "auto", torch.bfloat16),
        ("cuda", "float16", torch.float16),
    ],
)
@pytest.mark.parametrize("where", ["dtype", "torch_dtype", "text_config"])
def test_auto_is_the_checkpoints_dtype_on_cuda_and_float32_on_a_cpu(tmp_path, where, device, name, expected):
    config = {"text_config": {"dtype": "bfloat16"}} if where == "text_config" else {where: "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_dtype(tmp_path, torch.device(device), name) == expected


@pytest.mark.parametrize(
    "values", [{"eos_token_id": "x"}, {"eos_token_id": [3, "x"]}, {"max_new_tokens": "many"}, {"top_p": {}}]
)
def test_a_generation_config_of_another_kind_is_named(tmp_path: Path, values: dict[str, object]) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, **values}))
    with pytest.raises(ConfigError, match=r"MODEL=.*generation_config\.json"):
        generation_defaults(path)


@pytest.mark.parametrize("name", ["xpu", "mps", "meta", "hpu:1", "nonsense"])
def test_a_device_that_torch_knows_and_the_workers_do_not_is_one_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {name} is .*: use cpu, cuda or cuda:N"):
        resolve_device(name)


def test_cudnns_attention_is_off_before_anything_runs_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert cuda.calls == [("enable_cudnn_sdp", False), ("set_device", "cuda:1")]


def test_cuda_without_a_number_is_the_first_gpu_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    assert resolve_device("cuda") == torch.device("cuda", 0)
