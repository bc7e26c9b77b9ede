"""Weights of 8-bit checkpoints are those that the formats' own libraries make of them, on every way in."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.data.checkpoints import build_checkpoint, edit_config
from support.data.quantized import Format, compressed, fp8, write_quantized
from support.parallel.batches import open_decoder
from support.zoo.checkpoint import checkpoint as zoo_checkpoint
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.encoder_worker.loading import load_tower
from triptych.models.base import DecoderSide
from triptych.models.checkpoint import quantized as quantized_module
from triptych.models.checkpoint.quantized import check_decoder
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.registry import family_of
from triptych.models.weights import dequantization

CPU = torch.device("cpu")


def is_decoders(key: str) -> bool:
    return any(part in key for part in ("language_model.layers", "language_model.model.layers", "decoder."))


def is_everybodys(key: str) -> bool:
    return key.endswith(("weight", "_proj"))


FORMATS = {
    "fp8-block": fp8((16, 16)),
    "fp8-tensor": fp8(None),
    "ct-fp8-channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-fp8-tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct-fp8-block": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
    "ct-int8-channel": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "ct-int8-group": compressed("int-quantized", num_bits=8, type="int", strategy="group", group_size=16),
    "ct-packed8-channel": compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "ct-packed8-group": compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=16),
    "ct-int8-tensor": compressed("int-quantized", num_bits=8, type="int", strategy="tensor"),
}


def loaded(path: Path, dtype: str = "float32", parallel: TensorParallel | None = None) -> DecoderSide:
    """As it is loaded, before layers are fused."""
    return family_of(path).decoder.load(
        path, device=CPU, dtype=getattr(torch, dtype), attn_implementation="sdpa", parallel=parallel
    )


def assert_alike(one: DecoderSide, other: DecoderSide) -> None:
    found, expected = one.module.state_dict(), other.module.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_its_librarys_weights(form: Format, tmp_path: Path) -> None:
    source = build_checkpoint("qwen3_vl", variant="sharded+tied")
    quantized, plain = write_quantized(source, tmp_path, form, is_decoders)
    assert Checkpoint(quantized).scaled
    assert Checkpoint(quantized).files.keys() == Checkpoint(plain).files.keys()
    assert_alike(loaded(quantized), loaded(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2_5_vl", "fp8-block"),
        ("llava", "ct-int8-channel"),
        ("bart", "ct-fp8-channel"),
        ("whisper", "fp8-tensor"),
        ("t5", "ct-int8-group"),
        ("LlavaNextForConditionalGeneration", "fp8-block"),
        ("LlavaNextForConditionalGeneration", "ct-int8-channel"),
        ("LlavaNextForConditionalGeneration", "ct-packed8-group"),
        ("Qwen3VLMoeForConditionalGeneration", "fp8-block"),
        ("Qwen3_5MoeForConditionalGeneration", "fp8-block"),
        ("Glm4vMoeForConditionalGeneration", "ct-int8-channel"),
        ("InternVLForConditionalGeneration", "fp8-tensor"),
        ("Lfm2VlForConditionalGeneration", "ct-fp8-channel"),
    ],
)
def test_every_family_and_class_reads_them(family: str, form: str, dtype: str, tmp_path: Path) -> None:
    source = zoo_checkpoint(family) if family.endswith("Generation") else build_checkpoint(family)
    quantized, plain = write_quantized(source, tmp_path, FORMATS[form], is_decoders)
    assert_alike(loaded(quantized, dtype), loaded(plain, dtype))


@pytest.mark.parametrize(
    ("size", "form"),
    [
        (3, fp8((48, 64))),
        (3, fp8((64, 48))),
        *((2, FORMATS[n]) for n in ("ct-int8-channel", "ct-packed8-group", "ct-fp8-tensor")),
    ],
)
def test_a_rank_has_its_part_of_the_same_weights(size: int, form: Format, tmp_path: Path) -> None:
    """Three ranks cut rows and columns inside of blocks."""
    source = build_checkpoint("qwen3_vl", variant="six+sharded" if size == 3 else "sharded")
    quantized, plain = write_quantized(source, tmp_path, form, is_decoders)
    if size == 3:
        for weight in Checkpoint(quantized).scaled.values():
            rows, columns = weight.stored.shape
            assert rows // 3 % weight.block[0] or columns // 3 % weight.block[1]
    for rank in range(size):
        parallel = TensorParallel(rank, size)
        assert_alike(loaded(quantized, parallel=parallel), loaded(plain, parallel=parallel))


@pytest.mark.parametrize("family", ["Qwen3VLMoeForConditionalGeneration", "InternVLForConditionalGeneration"])
def test_a_rank_of_any_class_has_its_part_and_experts(family: str, tmp_path: Path) -> None:
    quantized, plain = write_quantized(zoo_checkpoint(family), tmp_path, FORMATS["fp8-block"], is_decoders)
    for rank in range(2):
        parallel = TensorParallel(rank, 2)
        assert_alike(loaded(quantized, parallel=parallel), loaded(plain, parallel=parallel))


@pytest.mark.parametrize("family", ["qwen3_vl", "LlavaNextForConditionalGeneration"])
def test_a_quantized_tower_computes_the_rows_of_its_floats(family: str, tmp_path: Path) -> None:
    source = zoo_checkpoint(family) if family.endswith("Generation") else build_checkpoint(family)
    form = Format({**FORMATS["fp8-block"].config, "modules_to_not_convert": None}, FORMATS["fp8-block"].write)
    rows = []
    for path in write_quantized(source, tmp_path, form, is_everybodys):
        tower = load_tower(EncoderConfig(model=str(path), dtype="float32", threads=1))
        with torch.inference_mode():
            rows.append(tower.encode([tower.preprocess(tower.sample(), {})])[0])
    assert torch.equal(*rows)


def test_weights_in_8_bits_are_rounded_again_from_the_floats(tmp_path: Path) -> None:
    source = build_checkpoint("qwen3_vl")
    quantized, plain = write_quantized(source, tmp_path, FORMATS["fp8-block"], is_decoders)
    one, other = (open_decoder(path, "float32", "int8").module.state_dict() for path in (quantized, plain))
    assert all(torch.equal(one[name].to_dense(), other[name].to_dense()) for name in other)


def test_short_blocks_at_the_ends_are_counted_as_published_ones_are(tmp_path: Path) -> None:
    """The grid of scales in DeepSeek's and Qwen's files is rounded up."""
    weight = torch.randn(200, 160).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    )
    [(_, floats)] = Checkpoint(tmp_path).read(["a.weight"])
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :160]
    assert torch.equal(floats, weight.float() * whole)


def test_scales_of_activations_and_of_caches_are_not_read(tmp_path: Path) -> None:
    quantized, plain = write_quantized(
        build_checkpoint("qwen3_vl"), tmp_path, FORMATS["ct-fp8-tensor"], is_decoders
    )
    file = quantized / "model.safetensors"
    layer = "model.language_model.layers.0.self_attn."
    more = {f"{layer}{name}": torch.ones(1) for name in ("q_proj.input_scale", "k_scale", "v_scale")}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    assert_alike(loaded(quantized), loaded(plain))


def test_the_log_names_the_format_and_the_bytes(tmp_path, caplog):
    quantized, _ = write_quantized(build_checkpoint("qwen3_vl"), tmp_path, FORMATS["fp8-block"], is_decoders)
    with caplog.at_level(logging.INFO, "triptych"):
        open_decoder(quantized, "bfloat16", "none")
    [line] = [each.getMessage() for each in caplog.records if "dequantized" in each.getMessage()]
    elements = sum(weight.stored.elements for weight in Checkpoint(quantized).scaled.values())
    assert "to bfloat16: " in line and "in FP8, a scale per 16x16" in line
    assert f"{elements / 1024:.1f} KiB in the files" in line or "MiB in the files" in line


def test_floats_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path, monkeypatch):
    quantized, _ = write_quantized(build_checkpoint("qwen3_vl"), tmp_path, FORMATS["fp8-block"], is_decoders)

    class Small:
        def free(self) -> int:
            return 1 << 16

    monkeypatch.setattr(dequantization, "memory_of", lambda device: Small())
    with pytest.raises(ConfigError, match=r"its weights take .* as float32, and 64\S* KiB of cpu are free"):
        open_decoder(quantized, "float32", "none")


def int8(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(8, 8, dtype=torch.int8), "weight_scale": torch.ones(8, 1), **more}


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (
            {"qweight": torch.ones(1, 8, dtype=torch.int32), "qzeros": torch.ones(1, 1, dtype=torch.int32)},
            {"quant_method": "gptq", "bits": 4},
            r"qweight is stored as I32 and 1 more tensors, quantized as gptq \(4 bits\)",
        ),
        (
            {"qweight": torch.ones(8, 1, dtype=torch.int32)},
            {"quant_method": "awq", "bits": 4},
            r"quantized as awq \(4 bits\)",
        ),
        (
            {"weight_packed": torch.ones(8, 1, dtype=torch.int32), "weight_scale": torch.ones(8, 1)},
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            r"compressed-tensors \(pack-quantized\)",
        ),
        (
            {
                "weight": torch.ones(8, 4, dtype=torch.uint8),
                "weight_scale": torch.ones(8, 1).to(torch.float8_e4m3fn),
                "weight_scale_2": torch.ones(()),
            },
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"modelopt \(NVFP4\)",
        ),
        (
            {"weight": torch.ones(32, 1, dtype=torch.uint8), "weight.absmax": torch.ones(8)},
            {"load_in_4bit": True},
            "quantized as bitsandbytes",
        ),
        (
            int8(weight_zero_point=torch.ones(8, 1, dtype=torch.int8)),
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            "is int8 with weight_zero_point beside it",
        ),
        (
            {**int8(), "weight_scale": torch.ones(3, 1)},
            {"quant_method": "compressed-tensors"},
            r"is int8 \[8, 8\] with scales \[3, 1\], which do not divide it",
        ),
        (
            {"weight": torch.ones(8, 0, dtype=torch.int8), "weight_scale": torch.ones(1)},
            {"quant_method": "compressed-tensors"},
            "is int8 and no matrix",
        ),
        (
            {"weight": torch.ones(8, 8).to(torch.float8_e4m3fn)},
            {"quant_method": "fp8"},
            "is FP8 without weight_scale or _scale_inv beside it",
        ),
        (
            {
                "weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
                "weight_scale_inv": torch.ones(1, 1, dtype=torch.uint8),
            },
            {"quant_method": "fp8"},
            "is FP8 with scales that are stored as U8",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_formats_are_refused_by_name_with_a_remedy_for_the_device(
    tensors, config, words, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(quantized_module, "cpu_flags", lambda: frozenset())
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    file = path / "model.safetensors"
    name = "model.language_model.layers.0.mlp.up_proj"
    held = {key: value for key, value in load_file(file).items() if key != f"{name}.weight"}
    save_file({**held, **{f"{name}.{key}": value for key, value in tensors.items()}}, file)
    edit_config(path, quantization_config=config)
    remedy = r"--engine vllm$" if device == "cuda" else r"--engine vllm on a GPU \(--device cuda\)$"
    if "bitsandbytes" in words:
        remedy = "or an unquantized one$"  # vLLM 0.32 has dropped it
    with pytest.raises(ConfigError, match=rf"{words}.* a native decoder does not read: give one .*{remedy}"):
        check_decoder(path, device)


_ON_CPU = r"--engine vllm with --dtype float16, to all workers of the model$"
_ON_GPU = r"--engine vllm on a GPU \(--device cuda\)$"
_INT4 = {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}


@pytest.mark.parametrize(
    ("config", "chip", "remedy"),
    [
        ({"quant_method": "awq", "bits": 4}, "avx512f avx512bw avx512dq avx512vl", _ON_CPU),
        ({"quant_method": "gptq", "bits": 4}, "avx512f avx512bw avx512dq avx512vl", _ON_CPU),
        ({"quant_method": "compressed-tensors", **_INT4}, "avx512f avx512bw avx512dq avx512vl", _ON_CPU),
        ({"quant_method": "awq", "bits": 4}, "avx2", _ON_GPU),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "avx512f avx512bw avx512dq avx512vl", _ON_GPU),
    ],
)
def test_on_a_cpu_whose_vllm_has_the_product_that_is_the_remedy(config, chip, remedy, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_module, "cpu_flags", lambda: frozenset(chip.split()))
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    file = path / "model.safetensors"
    save_file({**load_file(file), "a.qweight": torch.ones(1, 8, dtype=torch.int32)}, file)
    edit_config(path, quantization_config=config)
    with pytest.raises(ConfigError, match=remedy):
        check_decoder(path)


def test_a_class_that_vllm_is_not_put_behind_is_not_sent_there(tmp_path: Path) -> None:
    path = build_checkpoint("bart", tmp_path / "model")
    file = path / "model.safetensors"
    save_file({**load_file(file), "a.qweight": torch.ones(1, 8, dtype=torch.int32)}, file)
    edit_config(path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="or an unquantized one$"):
        check_decoder(path, "cuda")
