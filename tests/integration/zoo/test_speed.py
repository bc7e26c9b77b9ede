"""What the adapter speeds up, and which classes it holds in 8 bits: exactly, against `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from support.zoo.cases import Case
from support.zoo.checkpoint import checkpoint, model_of
from support.zoo.engine import Served
from support.zoo.status import SERVED
from triptych.base.errors import ConfigError
from triptych.models.fused.layers import FusedDecoderLayer
from triptych.models.generic import DECODER, ENCODER
from triptych.models.generic.sides import head_of
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.quantization import Int8Linear
from triptych.pd_worker.attention.attention import ATTENTION_NAME

pytestmark = pytest.mark.timeout(120)

#: Classes whose text model is after Llama's pattern; all others keep transformers' own layers.
FUSED = frozenset(
    (
        "Cosmos3Omni",
        "DeepseekVL",
        "DeepseekVLHybrid",
        "Emu3",
        "FunAsrNano",
        "GlmAsr",
        "GotOcr2",
        "GraniteSpeech",
        "Idefics2",
        "Idefics3",
        "InternVL",
        "Janus",
        "LightOnOcr",
        "Llava",
        "LlavaNext",
        "LlavaNextVideo",
        "LlavaOnevision",
        "Mistral3",
        "PaddleOCRVL",
        "PaliGemma",
        "QianfanOCR",
        "Qwen2Audio",
        "Qwen2VL",
        "Qwen2_5OmniThinker",
        "Qwen2_5_VL",
        "Qwen3ASR",
        "Qwen3VL",
        "SmolVLM",
        "VideoLlama3",
        "VideoLlava",
        "VipLlava",
        "Voxtral",
    )
)
#: Experts are stacked in parameters that are no linear layers.
STACKED = frozenset(
    (
        "Aria",
        "Cosmos3Edge",
        "DeepseekOcr2",
        "Ernie4_5_VLMoe",
        "Gemma4-experts",
        "Glm4vMoe",
        "InternVL-sinks",
        "Kimi_K25",
        "Llama4",
        "MiniMaxM3Sparse",
        "MuseSpark",
        "NemotronH_Omni_Reasoning_V3",
        "Qwen3OmniMoeThinker",
        "Qwen3VLMoe",
        "Qwen3_5Moe",
        "Step3p7",
    )
)
#: Fused with norms of heads, with windows, of sound; not fused, with sandwich norms, and with states.
FEW = ("InternVL", "Mistral3", "Qwen2Audio", "Gemma3", "Lfm3Vl")


def short(name: str) -> str:
    return name.replace("ForConditionalGeneration", "")


def kinds(*sides: Any) -> set[type[nn.Module]]:
    return {type(part) for side in sides for part in side.module.modules()}


@pytest.mark.parametrize("case", SERVED, indirect=True)
def test_layers_are_fused_where_the_text_model_is_after_llamas_pattern(case: Case) -> None:
    decoder = case.served.decoder
    name = short(case.served.recipe.name)
    assert (FusedDecoderLayer in kinds(decoder)) == (name in FUSED)
    assert PrepackedLinear in kinds(decoder) & kinds(case.served.encoder)


QUANTIZED = [name for name in SERVED if short(name) not in STACKED]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if short(name) in FEW else pytest.mark.slow) for name in QUANTIZED]
)
def test_a_class_in_8_bits_answers_as_generate_with_the_rounded_weights(name: str) -> None:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "quantize": True}
    path = checkpoint(name)
    decoder = DECODER.load(path, **options, attn_implementation=ATTENTION_NAME)
    encoder = ENCODER.without_processor(path, **options)
    model = copy.deepcopy(model_of(name))
    changed = 0
    for side in (encoder, decoder):
        for at, layer in side.module.named_modules():
            if isinstance(layer, Int8Linear):
                plain = model.get_submodule(at)
                plain.weight.data = layer.weight * layer.scale[:, None]
                changed += 1
    assert changed >= 10, changed
    assert type(head_of(decoder.module)) is nn.Linear
    case = Case.open(name, 16, Served.of(name, encoder, decoder), model)
    assert Int8Linear in kinds(decoder)
    plain_answers = Case.open(name, 16, case.served).references
    with case.engine(budget=33) as cell:
        case.assert_exact(case.answer(cell))
    logits = [reference.logits[0] for reference in (*case.references, *plain_answers)]
    count = len(case.references)
    assert all(not torch.equal(a, b) for a, b in zip(logits[:count], logits[count:], strict=True))


def test_scales_stay_in_float32_when_the_rest_does_not() -> None:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "quantize": True}
    path = checkpoint("InternVLForConditionalGeneration")
    decoder = DECODER.load(path, **options, attn_implementation=ATTENTION_NAME)
    found: dict[str, set[torch.dtype]] = {}
    for part in decoder.module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            kind = name if isinstance(part, Int8Linear) and name != "bias" else "other"
            found.setdefault(kind, set()).add(parameter.dtype)
    assert found == {"weight": {torch.int8}, "scale": {torch.float32}, "other": {torch.bfloat16}}


@pytest.mark.parametrize("name", [name for name in SERVED if short(name) in STACKED][:2])
def test_experts_that_are_no_linear_layers_are_refused_in_8_bits_by_name(name: str) -> None:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "quantize": True}
    with pytest.raises(ConfigError, match=r"experts of \w+ are not held in 8 bits: leave out --quantization"):
        DECODER.load(checkpoint(name), **options, attn_implementation=ATTENTION_NAME)
