"""Linear layers in 8 bits: what they compute, what they hold, and whose keys change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.data.checkpoints import FAMILIES, build_checkpoint
from support.data.model_prompts import ModelPrompt, batch_logits
from support.encdec.checkpoints import FAMILIES as ENCDEC_FAMILIES
from support.encdec.reference import NAME, decoder_logits
from support.engine.reference_attention import NAME as DENSE
from triptych.apps.launch.plan.memory import weight_bytes
from triptych.models.identity import model_identity
from triptych.models.registry import load_decoder, load_encoder
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.quantization import (
    QUANTIZATIONS,
    Int8Linear,
    inputs_are_quantized,
    is_exact,
    quantize,
    replace_linears,
)

CPU = torch.device("cpu")
#: Those that this machine can compute.
SERVED = [name for name in QUANTIZATIONS if is_exact() or not inputs_are_quantized(name)]


def quantized_copy(linear: nn.Linear) -> Int8Linear:
    made = Int8Linear(linear)
    weight, scale = quantize(linear.weight.detach())
    made.load_state_dict({"weight": weight, "scale": scale}, strict=False, assign=True)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "out"), [(1, 24), (4, 24), (5, 24), (3, 5000)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_product_is_that_of_the_rounded_weight(dtype, error, rows, out, bias):
    torch.manual_seed(0)
    linear = nn.Linear(64, out, bias=bias, dtype=dtype)
    made = quantized_copy(linear)
    x = torch.randn(2, rows, 64).to(dtype)
    rounded = made.weight.float() * made.scale[:, None]
    wanted = functional.linear(x.float(), rounded, None if linear.bias is None else linear.bias.float())
    assert made(x).dtype == dtype
    torch.testing.assert_close(made(x).float(), wanted, atol=error, rtol=error)


@pytest.mark.parametrize("inputs", [8, 24, 40, 100])
def test_inputs_of_no_whole_block_do_not_reach_the_kernel_which_reads_beyond_them(inputs: int) -> None:
    linear = nn.Linear(inputs, 24, dtype=torch.bfloat16)
    made, x = quantized_copy(linear), torch.randn(2, inputs).bfloat16()
    wanted = functional.linear(x.float(), made.weight.float() * made.scale[:, None], linear.bias.float())
    torch.testing.assert_close(made(x).float(), wanted, atol=1e-2, rtol=1e-2)


def test_no_weight_moves_by_more_than_half_a_step_of_its_channel_and_zeros_stay() -> None:
    weight = torch.randn(8, 100) * torch.logspace(-4, 3, 8)[:, None]
    weight[3] = 0
    whole, scale = quantize(weight)
    step = weight.abs().amax(dim=1) / 127
    assert ((whole * scale[:, None] - weight).abs() <= step[:, None] / 2 * 1.001).all()
    assert not whole[3].any()
    assert (whole.abs().amax(dim=1)[step > 0] == 127).all()


def test_a_layer_that_two_modules_hold_stays_one_and_the_head_stays_as_it_is() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(4, 4))
            self.right = nn.Sequential(self.left[0])
            self.lm_head = nn.Linear(4, 9)
            self.embed_tokens = nn.Embedding(9, 4)

    pair = Pair()
    names = replace_linears(pair)
    assert names >= {"left.0.weight"}
    assert isinstance(pair.left[0], Int8Linear)
    assert pair.left[0] is pair.right[0]
    assert type(pair.lm_head) is nn.Linear


@pytest.mark.parametrize("family", [*FAMILIES, *ENCDEC_FAMILIES])
def test_both_sides_of_every_family_load_in_8_bits_and_take_less(family: str) -> None:
    path = build_checkpoint(family)
    options = {"device": CPU, "dtype": torch.float32}
    for quantization in ("int8", "int8-decoder"):
        encoder = load_encoder(path, **options, quantization=quantization)  # type: ignore[arg-type]
        decoder = load_decoder(path, **options, attn_implementation=NAME, quantization=quantization)  # type: ignore[arg-type]
        linears = [m for m in decoder.module.modules() if type(m) is nn.Linear]
        assert linears == [decoder.module.get_submodule("lm_head")]
        assert any(isinstance(m, Int8Linear) for m in encoder.module.modules()) == (quantization == "int8")
        plain = load_decoder(path, **options, attn_implementation=NAME)  # type: ignore[arg-type]
        assert parameter_bytes(decoder.module) < parameter_bytes(plain.module)


def rounded(module: nn.Module) -> None:
    """Linear layers but the head get the values that 8 bits can say."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, PrepackedLinear)) and not name.endswith("lm_head"):
            whole, scale = quantize(layer.weight.detach().to_dense())
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight.data = whole * scale[:, None]
            layer.weight = plain.weight if type(layer) is nn.Linear else PrepackedLinear(plain).weight


@pytest.mark.parametrize("family", [*FAMILIES, *ENCDEC_FAMILIES])
def test_every_family_computes_with_the_rounded_weights(family: str) -> None:
    path = build_checkpoint(family)
    plain = load_encoder(path, device=CPU, dtype=torch.float32)
    rounded(plain.module)
    encoder = load_encoder(path, device=CPU, dtype=torch.float32, quantization="int8")
    item = encoder.preprocess(encoder.sample(), {})
    [rows], [wanted] = encoder.encode([item]), plain.encode([item])
    torch.testing.assert_close(rows, wanted, atol=2e-4, rtol=1e-3)
    attention = NAME if family in ENCDEC_FAMILIES else DENSE
    decoders = [
        load_decoder(
            path, device=CPU, dtype=torch.float32, attn_implementation=attention, quantization=quantization
        )
        for quantization in ("int8", "none")
    ]
    rounded(decoders[1].module)
    ids = list(range(40, 52))
    if family in ENCDEC_FAMILIES:
        got, expected = (decoder_logits(decoder, [ids], [wanted])[0] for decoder in decoders)
    else:
        got, expected = (batch_logits(decoder, [ModelPrompt(ids, [], [])]) for decoder in decoders)
    assert float(expected.std()) > 0.5
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)


def test_keys_change_with_what_is_computed_otherwise(tmp_path: Path) -> None:
    path = build_checkpoint("bart", tmp_path / "model")
    identities = {
        name: model_identity(path, dtype=torch.float32, quantization=name) for name in QUANTIZATIONS
    }
    assert len({identity.model_key for identity in identities.values()}) == len(QUANTIZATIONS)
    assert identities["none"] == model_identity(path, dtype=torch.float32)
    assert identities["int8-decoder"].namespace == identities["none"].namespace
    assert identities["w8a8-decoder"].namespace == identities["none"].namespace
    towers = {identities[name].namespace for name in ("none", "int8", "w8a8")}
    assert len(towers) == 3


@pytest.mark.parametrize("family", ["qwen3_vl", "bart", "t5", "whisper", "trocr"])
def test_the_plan_before_loading_holds_what_both_sides_take(family: str) -> None:
    path = build_checkpoint(family)
    options = {"device": CPU, "dtype": torch.float32}
    for quantization in SERVED:
        encoder = load_encoder(path, **options, quantization=quantization)  # type: ignore[arg-type]
        decoder = load_decoder(path, **options, attn_implementation=NAME, quantization=quantization)  # type: ignore[arg-type]
        held = max(parameter_bytes(encoder.module), parameter_bytes(decoder.module))
        assert held <= weight_bytes(path, "float32", quantization)
    for quantization in ("int8", "w8a8"):
        assert weight_bytes(path, "float32", quantization) < 0.8 * weight_bytes(path, "float32")
