"""Which tensors and settings of an encoder-decoder checkpoint go where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.data.checkpoints import build_checkpoint
from support.encdec.checkpoints import FAMILIES
from support.encdec.reference import NAME
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import ItemPlan
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.identity import model_identity
from triptych.models.registry import family_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def encoder(path: Path, dtype: torch.dtype = torch.float32) -> EncoderSide:
    """As it is loaded, before layers are fused."""
    return family_of(path).encoder.load(path, device=CPU, dtype=dtype)


def decoder(path: Path, dtype: torch.dtype = torch.float32) -> DecoderSide:
    return family_of(path).decoder.load(path, device=CPU, dtype=dtype, attn_implementation=NAME)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sides_have_no_layer_of_the_other(family: str) -> None:
    path = build_checkpoint(family)
    tower = [name for name, _ in encoder(path).module.named_parameters()]
    text = [name for name, _ in decoder(path).module.named_parameters()]
    assert not [name for name in tower if "encoder_attn" in name or "EncDec" in name or "lm_head" in name]
    assert all(name.startswith(("decoder.", "lm_head.")) for name in text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_cross_projection_is_named(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, tmp_path / "model")
    file = path / "model.safetensors"
    tensors = load_file(file)
    lost = next(key for key in tensors if "encoder_attn.k_proj.weight" in key or "EncDecAttention.k" in key)
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, file)
    encoder(path)
    with pytest.raises(ConfigError, match=r"lacks tensors: decoder\."):
        decoder(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_cross_attention_are_those_of_the_decoders_own(family: str) -> None:
    side = decoder(build_checkpoint(family))
    own, cross = side.geometry, side.cross
    assert (cross.num_layers, cross.num_kv_heads, cross.head_dim) == (
        own.num_layers,
        own.num_kv_heads,
        own.head_dim,
    )
    projected = side.project_cross(torch.zeros(7, cross.width))
    assert len(projected) == own.num_layers
    assert {tuple(part.shape) for pair in projected for part in pair} == {(7, own.num_kv_heads, own.head_dim)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_that_no_encoder_of_the_model_made_is_refused(family: str) -> None:
    side = decoder(build_checkpoint(family))
    plan = ItemPlan("0" * 64, "n", type(side).modality, 5, side.cross.width, "float32", 0)
    assert side.placeholder(plan) == []
    wrong = [replace(plan, rows=0), replace(plan, width=plan.width + 1), replace(plan, length=5)]
    if side.cross.max_rows:
        wrong.append(replace(plan, rows=side.cross.max_rows + 1))
    for other in wrong:
        with pytest.raises(InvalidRequest) as refused:
            side.placeholder(other)
        assert refused.value.param == "plan"


@pytest.mark.parametrize(
    ("family", "start", "prompt"), [("bart", 2, (2, 0)), ("mbart", 2, (2, 4)), ("t5", 0, (0,))]
)
def test_the_default_decoder_prompt(family: str, start: int, prompt: tuple[int, ...]) -> None:
    defaults = decoder(build_checkpoint(family)).prompt_defaults({})
    assert (defaults.start, defaults.token_ids) == (start, prompt)
    assert defaults.prepend_start([51, 178]) == (start, 51, 178)
    assert defaults.prepend_start([start, 51]) == (start, 51)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_sides_stay_near_the_fp32_reference(family: str) -> None:
    path = build_checkpoint(family)
    exact, rough = encoder(path), encoder(path, torch.bfloat16)
    item = exact.preprocess(exact.sample(), {})
    [wanted], [found] = exact.encode([item]), rough.encode([item])
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("whisper", lambda path: _set(path / "preprocessor_config.json", "n_fft", 512)),
        ("whisper", lambda path: _set(path / "preprocessor_config.json", "padding_value", 0.1)),
        ("bart", lambda path: _set(path / "tokenizer_config.json", "model_max_length", 77)),
    ],
)
def test_what_decides_the_towers_input_is_part_of_the_namespace(family, change, tmp_path):
    path = build_checkpoint(family, tmp_path / "model")
    before = model_identity(path, dtype="float32")
    change(path)
    after = model_identity(path, dtype="float32")
    assert before.namespace != after.namespace
    assert (before.model_key == after.model_key) == (family == "whisper")


@pytest.mark.parametrize(("family", "modality"), [("whisper", "audio"), ("t5", "text"), ("llava", "image")])
def test_an_identity_names_what_items_are(family: str, modality: str) -> None:
    assert model_identity(build_checkpoint(family), dtype="float32").modality == modality


def test_a_checkpoint_without_feature_extractor_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("whisper", tmp_path / "model")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        encoder(path)


def _set(file: Path, name: str, value: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))


@pytest.mark.parametrize(
    ("family", "decoders", "encoders"),
    [
        ("bart", "model.decoder.embed_positions.weight", "model.shared.weight"),
        ("t5", "decoder.final_layer_norm.weight", "encoder.final_layer_norm.weight"),
        ("whisper", "model.decoder.embed_positions.weight", "model.encoder.conv1.bias"),
        ("trocr", "decoder.model.decoder.embed_positions.weight", "encoder.embeddings.cls_token"),
    ],
)
def test_a_decoders_tensor_leaves_the_namespace_and_an_encoders_does_not(
    family, decoders, encoders, tmp_path
):
    path = build_checkpoint(family, tmp_path / "model")
    before = model_identity(path, dtype="float32")
    file = path / "model.safetensors"
    for key, same in ((decoders, True), (encoders, False)):
        tensors = load_file(file)
        tensors[key].view(-1)[3] += 1
        save_file(tensors, file, metadata={"format": "pt"})
        after = model_identity(path, dtype="float32")
        assert after.model_key != before.model_key
        assert (after.namespace == before.namespace) is same
