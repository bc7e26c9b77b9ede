"""`triptych doctor MODEL` of models of published size, from config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from triptych.apps.doctor.finding import CheckResult
from triptych.apps.doctor.model import check_model
from triptych.base.config import ClusterConfig, PDConfig
from triptych.base.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

#: What people serve, by families; the defaults of their config classes are the sizes of published models.
FAMILIES = (
    "Qwen3_5", "Qwen3_5Moe", "Gemma3", "Qwen3VLMoe", "Kimi_K25", "MiniMaxM3Sparse", "GlmOcr", "PaddleOCRVL",
    "Mistral3", "InternVL", "LlavaOnevision", "SmolVLM", "Idefics3", "Lfm2Vl", "Step3p7", "Llama4",
    "AyaVision", "Cohere2Vision", "GotOcr2", "Exaone4_5_", "Lfm3Vl", "CohereCompass",
)  # fmt: skip


def write_config(folder: Path, architecture: str) -> Path:
    config = getattr(transformers, architecture).config_class(architectures=[architecture])
    config.save_pretrained(folder)
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
    results = results_of(write_config(tmp_path, f"{family}ForConditionalGeneration"))
    for side in ("encoder side", "decoder side"):
        assert float(results[side].found.split()[0]) > 20, f"{side}: {results[side].found}"
    assert "a token" in results["KV cache"].found


@pytest.mark.parametrize("family", ["Voxtral", "Inkling", "Mllama"])
def test_a_class_that_cannot_be_served_is_refused_before_its_weights(family: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, f"{family}ForConditionalGeneration")
    with pytest.raises(ConfigError, match="cannot be served|not served yet"):
        list(check_model(ClusterConfig(), str(folder)))
