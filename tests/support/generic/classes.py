"""Tiny models of classes that have no family of their own, and what a processor would give for pictures."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

IMAGE, VIDEO, START, END, BREAK = 255, 254, 253, 252, 251
_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_channels": 3, "patch_size": 4,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TinyItem:
    """A picture's tensors, and the tokens that stand for it."""

    tensors: Tensors
    token_ids: list[int]


@dataclass(frozen=True)
class TinyClass:
    """A class's architecture, its config, and its pictures by number."""

    architecture: str
    config: dict[str, Any]
    item: Callable[[int], TinyItem]


def _pixels(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + number))


def _grid(*patch: int) -> Callable[[int], TinyItem]:
    def item(number: int) -> TinyItem:
        _, height, width = grid = ((1, 4, 6), (1, 8, 4), (1, 6, 6))[number]
        tensors = {
            "pixel_values": _pixels(number, height * width, *patch), "image_grid_thw": torch.tensor([grid])
        }  # fmt: skip
        return TinyItem(tensors, [START, *[IMAGE] * (height * width // 4), END])

    return item


def _square(number: int) -> TinyItem:
    return TinyItem({"pixel_values": _pixels(number, 1, 3, 16, 16)}, [START, *[IMAGE] * 4, END])


def _tiles(number: int) -> TinyItem:
    """A base view and tiles, whose rows of the grid end with a newline."""
    height, width = ((16, 32), (32, 32), (32, 16))[number]
    pixels = _pixels(number, 1, 1 + height * width // 256, 3, 16, 16)
    rows = 16 + height // 4 * (width // 4 + 1)
    return TinyItem(
        {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])},
        [START, *[IMAGE] * rows, END],
    )


def _lines(number: int) -> TinyItem:
    """Any size, with a break after each row of placeholders."""
    height, width = ((16, 24), (32, 16), (24, 24))[number]
    pixels = torch.nn.functional.pad(_pixels(number, 1, 3, height, width), (0, 32 - width, 0, 32 - height))
    body = [*[IMAGE] * (width // 8), BREAK] * (height // 8)
    return TinyItem(
        {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}, [*body[:-1], END]
    )


def _siglip() -> dict[str, Any]:
    return {"model_type": "siglip_vision_model", **_TOWER, "image_size": 16, "vision_use_head": False}


_LAYERS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
CLASSES = {
    "plain": TinyClass(
        "LlavaNextForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "vision_config": {
                "model_type": "clip_vision_model", **_TOWER, "image_size": 16, "projection_dim": 32
            },
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
            "image_seq_length": 16,
        },
        _tiles,
    ),
    "windows": TinyClass(
        "AyaVisionForConditionalGeneration",
        {
            "text_config": {"model_type": "cohere2", **_TEXT, **_LAYERS, "logit_scale": 0.25},
            "vision_config": _siglip(),
            "image_token_index": IMAGE,
            "downsample_factor": 2,
            "adapter_layer_norm_eps": 1e-6,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
        _square,
    ),
    "grids": TinyClass(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, **_ROPE},
            "vision_config": {
                "depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4,
                "patch_size": 4,
            },
            **_QWEN_IDS,
        },
        _grid(96),
    ),
    "levels and experts": TinyClass(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {**_TEXT, **_ROPE, **_EXPERTS},
            "vision_config": {
                **_QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]
            },
            **_QWEN_IDS,
        },
        _grid(96),
    ),
    "spans": TinyClass(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "gemma3_text", **_TEXT, **_LAYERS, "query_pre_attn_scalar": 16,
                "final_logit_softcapping": 20.0,
            },
            "vision_config": _siglip(),
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
        },
        _square,
    ),
    "runs": TinyClass(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **_TOWER, "head_dim": 8, "image_size": 32},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
        },
        _lines,
    ),
    "latent attention": TinyClass(
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "deepseek_v3", **{k: v for k, v in _TEXT.items() if k != "head_dim"}, **_MLA
            },
            "vision_config": {
                **{k: v for k, v in _TOWER.items() if k != "num_channels"}, "pos_emb_height": 8,
                "pos_emb_width": 8,
            },
            "projection_hidden_size": 32,
            **_QWEN_IDS,
        },
        _grid(3, 4, 4),
    ),
}  # fmt: skip


def build(tiny: TinyClass, seed: int = 0) -> PreTrainedModel:
    """The class with weights so large that pictures and attention decide its answers."""
    cls = getattr(transformers, tiny.architecture)
    model = cls(cls.config_class(**tiny.config)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter += 0.15 * noise
            elif "embed" in name and parameter.dim() == 2:
                parameter.copy_(noise * 0.06)
            else:
                gain = 3.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.2
                parameter.copy_(noise * gain / parameter[0].numel() ** 0.5)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()


@functools.cache
def tiny_model(name: str) -> tuple[PreTrainedModel, Path]:
    """The model of a class, and the folder that it is saved in, which must not be changed."""
    model = build(CLASSES[name])
    folder = Path(tempfile.mkdtemp(prefix=f"triptych-generic-{os.getpid()}-"))
    model.save_pretrained(folder)
    return model, folder


def prompt(tiny: TinyClass, seed: int, numbers: Sequence[int]) -> tuple[list[int], list[TinyItem]]:
    """Text, a picture, text, and so on: token ids with placeholders, and the pictures."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(10, 200, (count,), generator=generator).tolist()

    ids, items = text(5 + seed), []
    for number in numbers:
        items.append(tiny.item(number))
        ids += [*items[-1].token_ids, *text(4)]
    return ids, items
