"""Checkpoints of the tests as vLLM reads them: the processor's configuration is in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.data.checkpoints import build_checkpoint

#: The most items of each modality in a request; a modality that a family lacks must not be named.
LIMITS = {"qwen3_vl": {"image": 8, "video": 0}, "qwen2_5_vl": {"image": 8, "video": 0}, "llava": {"image": 8}}
#: vLLM 0.32 knows LLaVA's keys as hubs have them, and not as transformers 5 writes them.
_VARIANTS = {"llava": "wide+hub"}


def vllm_checkpoint(family: str, folder: Path) -> Path:
    """A checkpoint that vLLM and our workers serve."""
    checkpoint = build_checkpoint(family, folder, variant=_VARIANTS.get(family, "wide"))
    image = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (checkpoint / "processor_config.json").write_text(json.dumps(_processor(family, image)))
    return checkpoint


def reseeded(checkpoint: Path, seed: int) -> Path:
    """The checkpoint with other weights, by the seed."""
    draw = torch.Generator().manual_seed(seed)
    for file in checkpoint.glob("*.safetensors"):
        weights = {
            name: weight * (1 + 0.5 * torch.randn(weight.shape, generator=draw)).to(weight.dtype)
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    return checkpoint


def _processor(family: str, image: dict[str, Any]) -> dict[str, Any]:
    if family == "llava":
        return {
            "processor_class": "LlavaProcessor",
            "image_processor": image,
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            # CLIP's class token, which the strategy leaves out.
            "num_additional_image_tokens": 1,
        }
    name = {"qwen3_vl": "Qwen3VL", "qwen2_5_vl": "Qwen2_5_VL"}[family]
    video = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}[family]
    settings = {name: value for name, value in image.items() if name != "image_processor_type"}
    return {
        "processor_class": f"{name}Processor",
        "image_processor": image,
        "video_processor": settings | {"video_processor_type": video},
    }
