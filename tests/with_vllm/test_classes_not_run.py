"""Classes that vLLM has and our table lacks: how vLLM ends, in the words that our refusal quotes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.vllm_engine.alone import run_alone
from support.vllm_engine.classes import recipe_of
from support.zoo.checkpoint import write_checkpoint
from support.zoo.processors import ON_TORCHVISION, PROCESSORS
from support.zoo.recipe import Config
from triptych.base.vllm_classes import NOT_RUN

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(400)]

#: Fields of the parts of config.json as hubs have them, which transformers reads, too, and does not write.
FIELDS: dict[str, Config] = {
    "Ernie4_5_VLMoe": {},
    "Step3p7": {"vision_config": {"output_dim": None, "width": 32, "layers": 2, "heads": 4}},
    "MiniMaxM3Sparse": {
        "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2}, "rope_theta": 1e4},
        "text_config": {
            "hidden_act": "swigluoai",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.25,
            "moe_layer_freq": [1, 1, 1],
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 0, 0],
                "sparse_num_index_heads": 4,
                "sparse_topk_blocks": 16,
            },
        },
    },
}
#: The processor of ERNIE's videos, which ours has no settings for.
VIDEOS = {"video_processor_type": "Ernie4_5_VLMoeVideoProcessor", "temporal_patch_size": 2, "patch_size": 4}


@pytest.mark.parametrize("family", FIELDS)
def test_vllm_ends_with_what_the_refusal_quotes(family: str, tmp_path: Path) -> None:
    name = f"{family}ForConditionalGeneration"
    folder = tmp_path / "checkpoint"
    write_checkpoint(recipe_of(name), folder, PROCESSORS.get(family) or ON_TORCHVISION[family])
    config = json.loads((folder / "config.json").read_text())
    for part, fields in FIELDS[family].items():
        config[part] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    if family.startswith("Ernie"):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    job = {"checkpoint": str(folder), "dtype": "float32", "conversations": [], "tokens": 1, "out": ""}
    code, log = run_alone(tmp_path, {**job, "limits": {"image": 1}})
    (quoted,) = re.findall('"(.+)"', NOT_RUN[name])
    assert code and quoted in log, log[-4000:]
