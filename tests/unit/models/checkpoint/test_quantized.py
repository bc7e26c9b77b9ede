"""Checkpoints with a quantized decoder: what encoders, workers before vLLM and native ones do with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.data.checkpoints import build_checkpoint, edit_config
from support.zoo.checkpoint import checkpoint as zoo_checkpoint
from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.encoder_worker.loading import load, load_tower
from triptych.models.checkpoint.quantized import (
    check_for_engine,
    check_tower,
    quantization_of,
    quantized_tensors,
    read_quantized,
    read_scaled,
)
from triptych.models.identity import model_identity
from triptych.models.registry import family_of, load_decoder
from triptych.pd_worker.native import load_model
from triptych.pd_worker.vllm.own_server import server_args
from triptych.pd_worker.vllm.worker import load_front_model

#: As the FP8 checkpoints of Qwen have it.
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual"],
}
GENERIC = "LlavaNextForConditionalGeneration"


def is_decoders(key: str) -> bool:
    return "language_model.layers" in key or "language_model.model.layers" in key


def is_towers(key: str) -> bool:
    return "visual.blocks" in key or "vision_tower" in key


def quantized(source: Path, folder: Path, chosen: Callable[[str], bool] = is_decoders) -> Path:
    """A copy in which the chosen matrices are float8 with a scale beside each."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key in [
        key for key, value in tensors.items() if chosen(key) and value.dim() == 2 and "norm" not in key
    ]:
        if key.endswith(".weight"):
            value = tensors[key]
            scale = (value.abs().max() / 448).reshape(1, 1)
            tensors[key] = (value / scale).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    assert any(value.dtype == torch.float8_e4m3fn for value in tensors.values())
    return edit_config(folder, quantization_config=FP8)


@pytest.fixture(scope="module", params=["qwen3_vl", "llava", GENERIC])
def plain(request: pytest.FixtureRequest) -> Path:
    return zoo_checkpoint(request.param) if request.param == GENERIC else build_checkpoint(request.param)


@pytest.fixture(scope="module")
def folder(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(plain, tmp_path_factory.mktemp("fp8") / "model")


def encoder_config(path: Path) -> EncoderConfig:
    return EncoderConfig(model=str(path), dtype="float32", threads=1)


def test_an_encoder_computes_the_rows_of_the_unquantized_folder(plain: Path, folder: Path) -> None:
    rows = []
    for path in (plain, folder):
        tower = load_tower(encoder_config(path))
        with torch.inference_mode():
            rows.append(tower.encode([tower.preprocess(tower.sample(), {})])[0])
    assert torch.equal(*rows)


def test_a_namespace_is_the_encoders_and_the_one_that_vllm_is_given(tmp_path: Path) -> None:
    path = quantized(build_checkpoint("qwen3_vl"), tmp_path / "model")
    _, identity = load(encoder_config(path))
    assert model_identity(path, dtype="float32").namespace == identity.namespace
    config = PDConfig(model=str(path), engine="vllm", dtype="float32", store="redis://127.0.0.1:1")
    words = server_args(config, 8123, "store", 0)
    transfer = json.loads(words[words.index("--ec-transfer-config") + 1])
    assert transfer["ec_connector_extra_config"]["namespace"] == identity.namespace
    assert load_front_model(config, 512).identity.namespace == identity.namespace


def test_a_native_worker_takes_it_if_it_has_scales_and_refuses_it_if_not(
    folder: Path, tmp_path: Path
) -> None:
    assert load_model(PDConfig(model=str(folder), threads=1, kv_memory=1 << 24)).decoder
    path = shutil.copytree(folder, tmp_path / "model")
    file = path / "model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if not key.endswith("_scale_inv")}
    save_file(tensors, file, metadata={"format": "pt"})
    refused = "is FP8 without weight_scale or _scale_inv beside it .*, which a native decoder does not read"
    with pytest.raises(ConfigError, match=refused):
        load_model(PDConfig(model=str(path), threads=1, kv_memory=1 << 24))
    with pytest.raises(ConfigError, match=refused):
        load_decoder(path, device=torch.device("cpu"), dtype=torch.float32, attn_implementation="sdpa")


#: As compressed-tensors has it.
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}


def lists(**fields: object) -> dict[str, object]:
    return {**FP8, "modules_to_not_convert": None, **fields}


@pytest.mark.parametrize("family", ["qwen3_vl", GENERIC])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"modules_to_not_convert": ["lm_head"]},
        {"ignore": ["lm_head", "re:.*(visual|vision_tower|projector).*"], "config_groups": GROUPS},
        {"ignore": ["lm_head"], "config_groups": GROUPS},
        {"config_groups": {"group_0": {"targets": [r"re:.*language_model.*(q|k|v)_proj$"]}}},
        {
            "ignore": ["re:.*(visual|vision_tower|projector).*"],
            "config_groups": {"group_0": {"targets": [r"re:.*"]}},
        },
    ],
)
def test_a_tower_that_the_file_has_as_floats_is_one_unless_a_list_names_it(family, fields, tmp_path):
    source = zoo_checkpoint(family) if family == GENERIC else build_checkpoint(family)
    path = edit_config(quantized(source, tmp_path / "model"), quantization_config=lists(**fields))
    assert load_tower(encoder_config(path))


@pytest.mark.parametrize(
    "fields",
    [
        {"modules_to_not_convert": ["lm_head", "model.visual"]},
        {"modules_to_not_convert": ["visual"]},
        {"ignore": ["re:.*visual.*"]},
        {"ignored_layers": ["model.visual.blocks.0.attn.qkv"]},
    ],
)
def test_a_quantized_tensor_that_a_list_leaves_unconverted_is_named_with_its_entry(fields, tmp_path):
    path = quantized(build_checkpoint("qwen3_vl"), tmp_path / "model", is_towers)
    edit_config(path, quantization_config=lists(**fields))
    words = (
        r"visual\.blocks\.0\.attn\.\S+ is stored quantized \(F\S+\), and quantization_config\.\w+ has "
        r"'\S*visual\S*', by which it is not: correct the list"
    )
    with pytest.raises(ConfigError, match=words):
        load_tower(encoder_config(path))


@pytest.mark.parametrize("target", [r"re:.*attn.qkv$", "model.visual.blocks.0.attn.qkv"])
def test_a_tensor_that_a_list_names_as_quantized_and_the_file_has_as_floats_is_named(target, tmp_path):
    path = quantized(build_checkpoint("qwen3_vl"), tmp_path / "model")
    groups = {"group_0": {"targets": ["Linear", target]}}
    edit_config(path, quantization_config=lists(config_groups=groups))
    words = (
        r"visual\.blocks\.0\.attn\.qkv\.weight is stored as F\d+, and .*targets has .* is quantized: correct"
    )
    with pytest.raises(ConfigError, match=words):
        load_tower(encoder_config(path))


@pytest.mark.parametrize("family", ["qwen3_vl", GENERIC])
def test_an_encoder_names_a_tensor_of_its_tower_that_it_does_not_read(family: str, tmp_path: Path) -> None:
    source = zoo_checkpoint(family) if family == GENERIC else build_checkpoint(family)
    path = quantized(source, tmp_path / "model", is_towers)
    edit_config(path, quantization_config=lists())
    assert load_tower(encoder_config(path))
    file = path / "model.safetensors"
    packed = {
        key: value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        for key, value in load_file(file).items()
    }
    save_file(packed, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"(visual|vision).* as U8 and \d+ more .* unquantized one"):
        load_tower(encoder_config(path))


def test_a_config_that_names_nothing_hides_no_quantized_tensor(tmp_path: Path) -> None:
    path = quantized(build_checkpoint("qwen3_vl"), tmp_path / "model")
    edit_config(path, quantization_config=None)
    check_for_engine(path, PDConfig())
    check_tower(path, family_of(path).keys.encoder_names)
    assert all("language_model" in key for key in read_quantized(path))
    assert read_scaled(path).weights


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({}, True),
        ({"engine": "native", "device": "cuda"}, True),
        ({"engine": "vllm"}, False),
        ({"engine_url": "http://127.0.0.1:1"}, False),
        ({"device": "cuda:1"}, False),
    ],
)
def test_a_cluster_is_refused_where_its_workers_would_decode_themselves(flags, refused, tmp_path):
    path = edit_config(build_checkpoint("qwen3_vl", tmp_path / "model"), quantization_config={"bits": 4})
    if not refused:
        check_for_engine(path, PDConfig(**flags))
        return
    with pytest.raises(ConfigError, match="remove quantization_config from it"):
        check_for_engine(path, PDConfig(**flags))


AVX2 = "fma avx avx2 bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.mark.parametrize(
    ("method", "flags", "instead"),
    [
        ("awq", {}, "float16"),
        ("gptq", {"dtype": "float32"}, "float16"),
        ("fp8", {}, "bfloat16"),
        ("awq", {"dtype": "float16"}, ""),
        ("gptq", {"dtype": "bfloat16"}, ""),
        ("compressed-tensors", {}, ""),
        # The dtype of the checkpoint, and of a server that has started.
        ("awq", {"device": "cuda"}, ""),
        ("awq", {"engine_url": "http://127.0.0.1:1"}, ""),
    ],
)
def test_a_vllm_of_ones_own_is_not_started_in_a_dtype_that_it_lacks(
    method, flags, instead, tmp_path, monkeypatch
):
    monkeypatch.setattr("triptych.models.checkpoint.quantized.cpu_flags", lambda: frozenset(AVX512.split()))
    source = build_checkpoint("qwen3_vl", tmp_path / "model")
    path = edit_config(source, quantization_config={"quant_method": method, "bits": 4})
    config = PDConfig(engine="vllm", **flags)
    if not instead:
        check_for_engine(path, config)
        return
    with pytest.raises(ConfigError, match=rf"{method} \(4 bits\).*give --dtype {instead} to all workers"):
        check_for_engine(path, config)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
@pytest.mark.parametrize(("dtype", "refused"), [("float32", True), ("float16", False)])
def test_no_server_computes_with_them_in_float32(method, dtype, refused, tmp_path):
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    edit_config(path, quantization_config={"quant_method": method, "bits": 4})
    config = PDConfig(engine_url="http://127.0.0.1:1", dtype=dtype)
    if not refused:
        check_for_engine(path, config)
        return
    with pytest.raises(ConfigError, match=rf"{method} \(4 bits\).*give --dtype as that server has it"):
        check_for_engine(path, config)


FOUR = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}
NVFP4 = {
    "format": "nvfp4-pack-quantized",
    "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}},
}
_WNA16 = r"in 4 bits, .*cpu_gemm_wna16.* on CPUs with AVX-512 alone: give .* or --device cuda"
_FP4 = "in FP4, .* vLLM has on no CPU: give one in FP8"


@pytest.mark.parametrize(
    ("quantization", "chip", "flags", "refused"),
    [
        ({"quant_method": "awq", "bits": 4}, AVX2, {}, _WNA16),
        ({"quant_method": "awq", "bits": 4}, AVX512, {}, ""),
        ({"quant_method": "gptq", "bits": 4}, AVX2, {}, _WNA16),
        ({"quant_method": "compressed-tensors", **FOUR}, AVX2, {}, _WNA16),
        ({"quant_method": "compressed-tensors", **FOUR}, AVX512, {}, ""),
        ({"quant_method": "compressed-tensors", **NVFP4}, AVX512, {}, _FP4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, AVX512, {}, _FP4),
        ({"quant_method": "gptq", "bits": 8}, AVX2, {}, ""),
        # Nothing is known of the processor, or it is not this machine's.
        ({"quant_method": "awq", "bits": 4}, "", {}, ""),
        ({"quant_method": "awq", "bits": 4}, AVX2, {"device": "cuda"}, ""),
        ({"quant_method": "awq", "bits": 4}, AVX2, {"engine_url": "http://127.0.0.1:1"}, ""),
        ({"quant_method": "compressed-tensors", **NVFP4}, AVX2, {"device": "cuda:1"}, ""),
        ({"quant_method": "fp8"}, AVX2, {}, ""),
    ],
)
def test_a_vllm_of_ones_own_is_not_started_where_its_build_lacks_the_product(
    quantization, chip, flags, refused, tmp_path, monkeypatch
):
    monkeypatch.setattr("triptych.models.checkpoint.quantized.cpu_flags", lambda: frozenset(chip.split()))
    path = edit_config(build_checkpoint("qwen3_vl", tmp_path / "model"), quantization_config=quantization)
    config = PDConfig(engine="vllm", **{"dtype": "bfloat16", **flags})
    if not refused:
        check_for_engine(path, config)
        return
    with pytest.raises(ConfigError, match=refused):
        check_for_engine(path, config)


PLAIN = {"model.visual.a.weight": "BF16", "model.ids": "I64", "model.mask": "BOOL", "model.table": "I32"}


@pytest.mark.parametrize(
    ("more", "quantization", "expected"),
    [
        ({}, {}, []),
        ({}, {"bits": 8}, ["model.table"]),
        ({"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"}, {}, ["a.weight", "a.weight_scale_inv"]),
        ({"a.qweight": "I32", "a.qzeros": "I32", "a.scales": "F16"}, {}, ["a.qweight", "a.qzeros"]),
        (
            {"a.weight_packed": "U8", "a.weight_scale": "F8_E4M3"},
            {},
            ["a.weight_packed", "a.weight_scale"],
        ),
        ({"a.weight": "U8", "a.weight.absmax": "F32"}, {}, ["a.weight.absmax"]),
        ({"a.weight": "I8", "a.SCB": "F32"}, {"bits": 8}, ["a.SCB", "a.weight", "model.table"]),
        ({}, {"ignore": ["model"]}, []),
        ({"a.weight": "I8", "a.SCB": "F32"}, {"ignore": ["model", "a"]}, ["a.SCB", "a.weight"]),
    ],
)
def test_dtypes_and_names_tell_what_is_quantized(more, quantization, expected):
    assert quantized_tensors({**PLAIN, **more}, quantization) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"quantization_config": {}}, {}),
        ({"quantization_config": FP8}, FP8),
        ({"text_config": {"quantization_config": FP8}}, FP8),
        ({"text_config": {"hidden_size": 3}, "quantization_config": None}, {}),
    ],
)
def test_a_quantization_is_named_by_the_config_or_a_part_of_it(config, expected):
    assert quantization_of(config) == expected
