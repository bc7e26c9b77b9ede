"""Which tensor goes to which side, and what happens when one is missing or too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from support.data.checkpoints import FAMILIES, build_checkpoint, edit_text_config
from support.encdec.checkpoints import FAMILIES as ENCDEC
from triptych.base.errors import ConfigError
from triptych.base.progress import BYTES, Progress
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.checkpoint.tensors import Checkpoint, Cut
from triptych.models.generic import sides
from triptych.models.registry import family_of, load_decoder
from triptych.models.weights import loading
from triptych.models.weights.loading import KeyMap

CPU = torch.device("cpu")
EMBEDDING = "model.language_model.embed_tokens.weight"
VARIANTS = ("", "hub", "sharded", "hub+sharded", "tied", "tied+hub")


def encoder(path: Path) -> EncoderSide:
    """As it is loaded, before layers are fused."""
    return family_of(path).encoder.load(path, device=CPU, dtype=torch.float32)


def decoder(path: Path) -> DecoderSide:
    return family_of(path).decoder.load(path, device=CPU, dtype=torch.float32, attn_implementation="sdpa")


def change_tensors(path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    file = path / "model.safetensors"
    tensors = load_file(file) | change
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    return path


@pytest.mark.parametrize("variant", ["", "hub", "sharded"])
@pytest.mark.parametrize("family", ENCDEC)
def test_the_union_of_both_sides_is_the_checkpoint_and_they_share_embeddings_of_texts_alone(family, variant):
    path = build_checkpoint(family, variant=variant)
    files, keys = Checkpoint(path).files, family_of(path).keys
    held_by_encoder, held_by_decoder = keys.encoder_names(files), keys.decoder_names(files)
    assert set(held_by_encoder) | set(held_by_decoder) == set(files)
    both = {key.removeprefix("model.") for key in set(held_by_encoder) & set(held_by_decoder)}
    assert both == ({"shared.weight"} if family in ("bart", "mbart", "t5") else set())


@pytest.mark.parametrize("variant", ["", "hub+sharded"])
@pytest.mark.parametrize("family", ENCDEC)
def test_each_side_holds_its_own_tensors_of_the_checkpoint_and_nothing_on_meta(family, variant):
    path = build_checkpoint(family, variant=variant)
    checkpoint, keys = Checkpoint(path), family_of(path).keys
    sides = (
        (encoder(path).module, keys.encoder_names(checkpoint.files)),
        (decoder(path).module, keys.decoder_names(checkpoint.files)),
    )
    for module, names in sides:
        held = dict(module.state_dict(keep_vars=True))
        assert not any(tensor.is_meta for tensor in (*held.values(), *module.buffers()))
        assert not any(parameter.requires_grad for parameter in module.parameters())
        for key, tensor in checkpoint.read(names):
            assert torch.equal(held[names[key]].to_dense(), tensor)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_together_hold_what_transformers_reads_of_a_checkpoint(family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    whole = dict(AutoModelForImageTextToText.from_pretrained(path).named_parameters())
    held_by = [dict(side(path).module.named_parameters()) for side in (encoder, decoder)]
    assert not held_by[0].keys() & held_by[1].keys()
    assert held_by[0].keys() | held_by[1].keys() == whole.keys()
    for name, held in (held_by[0] | held_by[1]).items():
        assert torch.equal(held.to_dense(), whole[name]) and not held.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sides_have_no_parameter_of_the_other(family: str) -> None:
    path = build_checkpoint(family)
    tower = [name for name, _ in encoder(path).module.named_parameters()]
    text = [name for name, _ in decoder(path).module.named_parameters()]
    assert not [
        name for name in tower if "lm_head" in name or "embed_tokens" in name or "self_attn.o_proj" in name
    ]
    assert not [name for name in text if "visual" in name or "vision" in name or "projector" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_the_embedding(family: str) -> None:
    module = decoder(build_checkpoint(family, variant="tied")).module
    assert module.get_parameter("lm_head.weight") is module.get_parameter(EMBEDDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untied_head_is_not_the_embedding(family: str) -> None:
    module = decoder(build_checkpoint(family)).module
    assert not torch.equal(module.get_parameter("lm_head.weight"), module.get_parameter(EMBEDDING))


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_frequencies_are_real_and_stay_in_float32_when_weights_do_not(family: str) -> None:
    path = build_checkpoint(family)
    side = load_decoder(path, device=CPU, dtype=torch.bfloat16, attn_implementation="sdpa")
    name = "model.language_model.rotary_emb.inv_freq"
    frequencies = side.module.get_buffer(name)
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, decoder(path).module.get_buffer(name))
    assert frequencies[0] == 1.0
    assert {parameter.dtype for parameter in side.module.parameters()} == {torch.bfloat16}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    change_tensors(path, {"model.language_model.norm.weight": None})
    with pytest.raises(ConfigError, match=r"lacks tensors: model\.language_model\.norm\.weight"):
        decoder(path)


def test_a_missing_head_of_an_untied_checkpoint_is_named(tmp_path: Path) -> None:
    path = change_tensors(build_checkpoint("llava", tmp_path / "model"), {"lm_head.weight": None})
    with pytest.raises(ConfigError, match=r"lacks tensors: lm_head\.weight"):
        decoder(path)


@pytest.mark.parametrize("family", ENCDEC)
def test_unknown_tensors_are_refused_by_both_sides(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, tmp_path / "model")
    change_tensors(path, {"audio_tower.weight": torch.zeros(2)})
    for load in (encoder, decoder):
        with pytest.raises(ConfigError, match=r"1 unknown tensors: audio_tower\.weight"):
            load(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_the_tower_has_no_place_for_is_named(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, tmp_path / "model")
    key = next(iter(family_of(path).keys.encoder_names(Checkpoint(path).files)))
    change_tensors(path, {key.replace("weight", "more").replace("bias", "more"): torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"has tensors too many: .*more"):
        encoder(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("qwen2_5_vl", tmp_path / "model")
    change_tensors(path, {"lm_head.weight": torch.zeros(3, 64)})
    with pytest.raises(ConfigError, match=r"has misshapen tensors: .*lm_head\.weight"):
        decoder(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_side_survives_the_deletion_of_its_files(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, tmp_path / "model")
    module = encoder(path).module
    before = {name: parameter.to_dense().clone() for name, parameter in module.named_parameters()}
    (path / "model.safetensors").write_bytes(b"")
    assert all(torch.equal(module.get_parameter(name).to_dense(), value) for name, value in before.items())


def test_a_tensor_that_two_sides_claim_unasked_is_refused() -> None:
    keys = KeyMap(encoder=((r"^x\.", ""),), decoder=((r"^x\.", "model."),))
    with pytest.raises(ConfigError, match=r"claimed by both sides: x\.y"):
        keys.check(["x.y"])
    KeyMap(encoder=keys.encoder, decoder=keys.decoder, shared=(r"^x\.",)).check(["x.y"])


def test_buffers_of_older_checkpoints_are_left_aside() -> None:
    keys = KeyMap(encoder=(), decoder=((r"^model\.", "model."),))
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    keys.check(["model.norm.weight", old])
    assert keys.decoder_names([old]) == {}


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": "large"}, {"num_attention_heads": 0}, {"head_dim": 7}, {"rms_norm_eps": None}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_config_that_makes_no_model_is_a_config_error(wrong: dict[str, object], tmp_path: Path) -> None:
    path = edit_text_config(build_checkpoint("qwen3_vl", tmp_path / "model"), **wrong)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_decoder(path, device=torch.device("cpu"), dtype=torch.float32, attn_implementation="sdpa")


CPU = torch.device("cpu")


class Counted(Progress):
    """A step that keeps what it has counted after each advance."""

    made: ClassVar[list[Counted]] = []

    def __init__(self, label: str, total: float, unit: str) -> None:
        super().__init__(label, total, unit)
        self.total, self.unit = total, unit
        self.counts: list[float] = []
        self.made.append(self)

    def advance(self, count: float = 1, **more: Any) -> None:
        self.counts.append(sum(self.counts[-1:]) + count)
        super().advance(count, **more)


@pytest.mark.parametrize("variant", ["", "hub+sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_count_their_tensors_bytes_up_to_the_last(monkeypatch, family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    for module in (loading, sides):
        monkeypatch.setattr(module, "Progress", Counted)
    for load in (encoder, decoder):
        Counted.made.clear()
        own = list(load(path).module.parameters())
        (step,) = Counted.made
        assert step.total == sum(tensor.nbytes for tensor in own)
        assert step.unit == BYTES
        assert len(step.counts) == len(own)
        # Counted, not only declared at the end.
        assert step.counts[-1] == step.total


def test_a_part_of_a_tensor_counts_as_its_part() -> None:
    checkpoint = Checkpoint(build_checkpoint("llava"))
    key, tensor = next((key, one) for key, one in checkpoint.read(checkpoint.files) if one.dim() == 2)
    cuts = {key: Cut(0, 0, tensor.shape[0] // 2, tensor.shape[0])}
    assert checkpoint.nbytes([key]) == tensor.nbytes
    ((_, part),) = checkpoint.read([key], cuts)
    assert checkpoint.nbytes([key], cuts) == part.nbytes == tensor.nbytes // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_tensors_of_every_dtype_have_their_size(tmp_path, dtype) -> None:
    path = build_checkpoint("llava")
    config = (path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    save_file(
        {"a": torch.zeros(3, 5, dtype=dtype), "b": torch.zeros((), dtype=dtype)}, tmp_path / "x.safetensors"
    )
    assert Checkpoint(tmp_path).nbytes(["a", "b"]) == 16 * dtype.itemsize
