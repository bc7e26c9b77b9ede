"""The demo model's configuration and its image processor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchEmbed

from examples.demo_models.images.batches import LEAST_PIXELS, MERGE, MOST_PIXELS, PATCH

_VOCABULARY_MULTIPLE = 64


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """Qwen3-VL at 3.4 million parameters: 4 vision layers, 5 text layers, two deepstack taps."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    vocabulary = -(-len(tokenizer) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    width = 160
    return Qwen3VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": 448,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def make_generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return GenerationConfig(bos_token_id=pad, eos_token_id=[end, pad], pad_token_id=pad, do_sample=False)


def make_image_processor() -> Qwen2VLImageProcessorPil:
    """Keeps pictures of 96x96 to 128x128 pixels as they are; brings larger ones down to that."""
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def make_model(config: Qwen3VLConfig) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration(config).float()


def _linear_patches(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The patch convolution as the matrix product it is; [patches, 1536] to [patches, width]."""
    weight = self.proj.weight.view(self.embed_dim, -1)
    return functional.linear(hidden_states, weight, self.proj.bias)


def use_linear_patches() -> None:
    """For training in this process: the same numbers, sooner, forward and backward."""
    Qwen3VLVisionPatchEmbed.forward = _linear_patches


def save_checkpoint(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """A transformers checkpoint folder; the weights go in as fp16, the model stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    for part in (config, config.text_config, config.vision_config):
        part.dtype = "float16"
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    make_generation_config(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_image_processor().save_pretrained(folder)
    weights = {
        name: parameter.detach().to(torch.float16).contiguous()
        for name, parameter in model.named_parameters()
    }
    partial = folder / "model.safetensors.new"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
