"""`triptych doctor MODEL` of models of published size, from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.zoo.cases import Case
from support.zoo.models import RECIPES
from triptych.apps.doctor import rows
from triptych.apps.doctor.finding import CheckResult
from triptych.apps.doctor.model import check_model
from triptych.base.config import ClusterConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.pd_worker.frontend.prompt import Prompt as BuiltPrompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_VIDEO_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GLM_ROPE = {
    "head_dim": 128,
    "rope_parameters": {**_VIDEO_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]},
}
#: What people serve, by families: the defaults of their config classes are the sizes of published models, but
#: for what those leave out.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5": {},
    "Qwen3_5Moe": {},
    "Gemma3": {},
    "Gemma4": {"vision_config": {}},
    "Gemma4Unified": {"vision_config": {}},
    "Qwen3VL": {},
    "Qwen3VLMoe": {},
    "Kimi_K25": {},
    "MiniMaxM3Sparse": {},
    "Glm4vMoe": {"text_config": _GLM_ROPE},
    "Glm46V": {"text_config": {"model_type": "glm4v_text", **_GLM_ROPE}},
    "Glmga": {"text_config": _GLM_ROPE},
    "GlmOcr": {},
    "PaddleOCRVL": {},
    "DeepseekOcr2": {
        "text_config": {
            "hidden_size": 1280,
            "num_hidden_layers": 12,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "mlp_layer_types": ["dense", *["sparse"] * 11],
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
        },
        "vision_config": {
            "sam_config": {"downsample_channels": [512, 896]},
            "encoder_config": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            },
        },
    },
    "Mistral3": {},
    "InternVL": {},
    "LlavaOnevision": {},
    "SmolVLM": {},
    "Idefics3": {},
    "Qwen2_5OmniThinker": {
        "vision_start_token_id": 151652,
        "text_config": {"rope_parameters": {**_VIDEO_ROPE, "mrope_section": [16, 24, 24]}},
    },
    "Qwen3OmniMoeThinker": {
        "vision_start_token_id": 151652,
        "text_config": {
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_parameters": {**_VIDEO_ROPE, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
    },
    "MiniCPMV4_6": {"image_token_id": 5},
    "MiniCPMV4_7": {"image_token_id": 5},
    "NemotronH_Omni_Reasoning_V3": {"image_token_id": 18},
    "Qwen2Audio": {},
    "Voxtral": {"audio_token_id": 24},
    "Qwen3ASR": {},
    "GlmAsr": {},
    "Lfm2Vl": {},
    "Lfm3Vl": {},
    "Step3p7": {},
    "Llama4": {},
    "Cohere2Vision": {},
    "GotOcr2": {},
    "Exaone4_5_": {},
}


#: Architectures of another name than their family's.
ARCHITECTURES = {
    "Glmga": "Glm46VForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3": "NemotronH_Omni_Reasoning_V3",
}


#: A hybrid, spans that attend both ways, further inputs, chunked attention.
KINDS = ("Qwen3_5", "Gemma3", "Gemma4", "Llama4")


@pytest.mark.parametrize("kind", KINDS)
def test_what_measures_rows_in_8_bits_reads_prompts_as_transformers_does(kind: str) -> None:
    name = next(name for name in RECIPES if name.startswith(f"{kind}ForC"))
    case = Case.open(name, rows.ANSWER_TOKENS)
    for prompt, reference in zip(case.prompts, case.references, strict=True):
        if len(prompt.items) != 1:
            continue
        features = case.served.features(prompt)
        (output,) = (case.served._encoded[feature.mm_hash] for feature in features)
        reader = rows.PromptReader(case.served.decoder, BuiltPrompt(tuple(prompt.token_ids), tuple(features)))
        with torch.inference_mode():
            logits = [reader.read(output.data, [])[-1]]
            logits += [reader.go_on(token)[-1] for token in reference.token_ids[:-1]]
            torch.testing.assert_close(torch.stack(logits), reference.logits, atol=1e-3, rtol=1e-3)
            whole = reader.read(output.data, reference.token_ids[:-1])
            torch.testing.assert_close(whole, reference.logits, atol=1e-3, rtol=1e-3)
            other = reader.read(output.data / 2, reference.token_ids[:-1])
            assert float((other - whole).abs().max()) > 1e-3


def write_config(folder: Path, family: str) -> Path:
    architecture = ARCHITECTURES.get(family, f"{family}ForConditionalGeneration")
    own = getattr(transformers, f"{family}Config", None)
    config_class = own or getattr(transformers, architecture).config_class
    config_class(architectures=[architecture], **FAMILIES.get(family, {})).save_pretrained(folder)
    return folder


def results_of(folder: Path) -> dict[str, CheckResult]:
    """The checks up to the one that this machine is too small for."""
    results = {}
    try:
        for result in check_model(
            ClusterConfig(model=str(folder), pd=PDConfig(model=str(folder))), str(folder)
        ):
            results[result.check] = result
    except ConfigError as error:
        assert "memory" in str(error), error
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_published_size_has_sides_and_a_kv_cache(family: str, tmp_path: Path) -> None:
    results = results_of(write_config(tmp_path, family))
    for side in ("encoder side", "decoder side"):
        assert float(results[side].found.split()[0]) > 20, f"{side}: {results[side].found}"
    assert "a token" in results["KV cache"].found


REFUSED = {
    "HunYuanVL": r"\(its processor rewrites the prompt around pictures\): serve it with vLLM",
    "Inkling": r"\(layers that keep a state or an index of their own\): serve it with vLLM",
    "UnlimitedOcr": r"\(layers that keep a state or an index of their own\): serve it with vLLM, in its form",
    "Mllama": r"\(attends to pictures within its layers\): serve it with SGLang",
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_class_that_cannot_be_served_is_refused_before_its_weights(family: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, family)
    with pytest.raises(ConfigError, match=REFUSED[family]):
        list(check_model(ClusterConfig(), str(folder)))
