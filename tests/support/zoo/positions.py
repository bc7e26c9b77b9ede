"""Recipes of classes with M-RoPE or DeepStack, and of those that attend both ways within a picture."""

from __future__ import annotations

import torch

from support.zoo.items import grid_item, placed_item, square_item, with_newlines_item
from support.zoo.recipe import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    BREAK,
    END,
    HIDDEN,
    IMAGE,
    MOE,
    QWEN_IDS,
    START,
    VIDEO,
    VOCAB_SIZE,
    Config,
    qwen_tower,
    recipe,
    rope,
    siglip,
    text,
    tower,
)

# fmt: off
_DEEP_TOWER = qwen_tower(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
_WINDOW_TOWER = qwen_tower(window_size=16, fullatt_block_indexes=[1])
_BOTH: Config = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_SOUND_IDS: Config = {"audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END}
_GLM_IDS: Config = {
    **_BOTH, "image_start_token_id": START, "image_end_token_id": END, "video_start_token_id": AUDIO_START,
    "video_end_token_id": AUDIO_END,
}
_GLM_TOWER = qwen_tower(image_size=32)
_GLM_ROPE = rope(partial_rotary_factor=1.0)
_SOUND_TOWER: Config = {
    "num_mel_bins": 16, "max_source_positions": 8, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "d_model": 32, "n_window": 4, "output_dim": HIDDEN,
}
_OMNI: Config = {
    "audio_config": _SOUND_TOWER, "image_token_index": IMAGE, "video_token_index": VIDEO,
    "audio_token_index": AUDIO, "vision_start_token_id": START, "vision_end_token_id": END,
    "position_id_per_seconds": 25, **_SOUND_IDS,
}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


def _between_start_and_end(token_ids: torch.Tensor) -> torch.Tensor:
    return ((token_ids >= END) & (token_ids <= IMAGE)).int()


POSITIONS = (
    recipe("Qwen3VL", grid_item(), text(**rope()), _DEEP_TOWER, **QWEN_IDS),
    recipe("Qwen3VLMoe", grid_item(), text(**rope(), **MOE), _DEEP_TOWER, **QWEN_IDS),
    recipe("Cosmos3Omni", grid_item(), text(**rope()), _DEEP_TOWER, **QWEN_IDS),
    recipe("Cosmos3Edge", grid_item(48), text(**rope()),
           tower(image_size=None, num_patches=64, spatial_merge_size=2), projector_hidden_size=48,
           **QWEN_IDS),
    recipe("Qwen2VL", grid_item(), text(**rope()),
           {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2, "num_heads": 4,
            "patch_size": 4},
           **QWEN_IDS),
    recipe("Qwen2_5_VL", grid_item(), text(**rope()), _WINDOW_TOWER, **QWEN_IDS),
    recipe("Qwen2_5OmniThinker", grid_item(), text(**rope()), _WINDOW_TOWER, **_OMNI),
    recipe("Qwen3OmniMoeThinker", grid_item(), text(**rope(mrope_interleaved=True), **MOE), _DEEP_TOWER,
           audio_config={**_SOUND_TOWER, "n_window_infer": 8, "conv_chunksize": 8,
                         "downsample_hidden_size": 16},
           audio_token_id=AUDIO, audio_start_token_id=AUDIO_START, **QWEN_IDS),
    recipe("Glm4v", grid_item(), text(**_GLM_ROPE), _GLM_TOWER, **_GLM_IDS),
    recipe("Glm46V", grid_item(), text("glm4v_text", **_GLM_ROPE),
           {"model_type": "glm4v_vision", **_GLM_TOWER},
           **_GLM_IDS),
    recipe("GlmOcr", grid_item(), text(**_GLM_ROPE), _GLM_TOWER, **_GLM_IDS),
    recipe("Glm4vMoe", grid_item(),
           text(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **_GLM_ROPE), _GLM_TOWER,
           **_GLM_IDS),
    recipe("Ernie4_5_VLMoe", grid_item(48),
           text(moe_intermediate_size=[32, 32], moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
                **rope((2, 2, 4))),
           qwen_tower(temporal_patch_size=None, out_hidden_size=None, temporal_merge_size=2),
           token_types={"moe_mm_token_type_ids": _between_start_and_end}, **_GLM_IDS),
    recipe("PaddleOCRVL", grid_item(3, 4, 4), text(**rope()), tower(spatial_merge_size=2), **QWEN_IDS),
    recipe("HunYuanVL", with_newlines_item, text(**rope((2, 2, 2, 2))),
           tower(image_size=None, out_hidden_size=HIDDEN, text_hidden_size=HIDDEN, max_image_size=32,
                 min_image_size=8),
           image_token_id=IMAGE, im_start_id=START, im_end_id=END, im_newline_id=BREAK),
    recipe("CohereCompass", grid_item(),
           text(sliding_window=8, logit_scale=0.25, layer_types=_WINDOWS,
                rope_parameters=dict.fromkeys(_WINDOWS, rope()["rope_parameters"])),
           _DEEP_TOWER, **QWEN_IDS),
    recipe("GraniteDocling", square_item(32, 4, tiles=True, ones={"pixel_attention_mask": (1, 1)}),
           text(attention_multiplier=0.25, logits_scaling=4.0),
           tower(image_size=32, scale_factor=4, out_hidden_size=HIDDEN, deepstack_visual_indexes=[0, 1]),
           join={"pixel_values": 1, "pixel_attention_mask": 1}, image_token_id=IMAGE, pad_token_id=0,
           tie_word_embeddings=False),
)

_GEMMA4_TOWER = tower(image_size=None, num_channels=None, num_key_value_heads=4, head_dim=8,
                      pooling_kernel_size=2, position_embedding_size=64)
_GEMMA4_IDS: Config = {
    **_BOTH, "boi_token_id": START, "eoi_token_id": END, "audio_token_id": AUDIO, "boa_token_id": AUDIO_START,
    "eoa_token_index": AUDIO_END,
}
_GEMMA4_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]

SPANS = (
    recipe("Gemma3", square_item(16, 4),
           text("gemma3_text", sliding_window=6, query_pre_attn_scalar=16, final_logit_softcapping=20.0,
                layer_types=_WINDOWS),
           siglip(), image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
           mm_tokens_per_image=4),
    recipe("PaliGemma", square_item(16, 16, (), ()), text("gemma"), siglip(projection_dim=HIDDEN),
           token_types={"token_type_ids": torch.zeros_like}, image_token_index=IMAGE, projection_dim=HIDDEN,
           hidden_size=HIDDEN),
    recipe("Gemma4", placed_item(4),
           text(num_hidden_layers=6, sliding_window=6, layer_types=_GEMMA4_LAYERS * 2, num_kv_shared_layers=3,
                hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB_SIZE,
                final_logit_softcapping=20.0),
           _GEMMA4_TOWER, variation="per-layer-inputs", **_GEMMA4_IDS),
    recipe("Gemma4", placed_item(4),
           text(sliding_window=6, layer_types=_GEMMA4_LAYERS, hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=VOCAB_SIZE, use_bidirectional_attention="vision",
                attention_k_eq_v=True, enable_moe_block=True, num_experts=8, top_k_experts=2,
                moe_intermediate_size=32),
           _GEMMA4_TOWER, variation="experts", **_GEMMA4_IDS),
    recipe("Gemma4Unified", placed_item(1),
           text(sliding_window=3, layer_types=_GEMMA4_LAYERS, use_bidirectional_attention="vision"),
           {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 64,
            "output_proj_dims": 32},
           audio_config=None, **_GEMMA4_IDS),
)
