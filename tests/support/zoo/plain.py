"""Recipes of classes with one row of positions and causal attention."""

from __future__ import annotations

import torch

from support.zoo.recipe import (
    AUDIO,
    END,
    GRIDS,
    HIDDEN,
    IMAGE,
    START,
    VIDEO,
    VOCAB_SIZE,
    Item,
    Recipe,
    clip,
    grid_item,
    pixels,
    pixtral_item,
    qwen_tower,
    siglip,
    square_item,
    text,
    tiled_item,
    tower,
    unpadded_item,
)

_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_PIXTRAL = tower("pixtral", head_dim=8, image_size=32)
_TILES = {"pixel_values": 1, "pixel_attention_mask": 1}
_MLA = {
    "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip


def _aria_item(number: int) -> Item:
    mask = torch.ones(1, 16, 16, dtype=torch.bool)
    tensors = {"pixel_values": pixels(number, 1, 3, 16, 16), "pixel_mask": mask}
    return Item(tensors, [START, *[IMAGE] * 4, END])


def _merged_item(number: int) -> Item:
    _, height, width = GRIDS[number]
    tensors = {
        "pixel_values": pixels(number, height * width, 48),
        "image_grid_thw": torch.tensor([GRIDS[number]]),
        "image_merge_sizes": torch.tensor([2]),
    }
    return Item(tensors, [START, *[IMAGE] * (height * width // 4), END])


def _half_item(number: int) -> Item:
    tensors = {"pixel_values": pixels(number, 1, 3, 64, 64)}
    return Item(tensors, [START, *[IMAGE] * 5, END])


def _two_scales_item(number: int) -> Item:
    tensors = {
        "pixel_values": pixels(number, 1, 3, 16, 16),
        "high_res_pixel_values": pixels(number + 10, 1, 3, 64, 64),
    }
    return Item(tensors, [START, *[IMAGE] * 16, END])


PLAIN = (
    Recipe(
        "LlavaForConditionalGeneration",
        {"text_config": text("llama"), "vision_config": clip(), "image_token_index": IMAGE, "image_seq_length": 16},
        square_item(16, 16),
    ),
    Recipe(
        "VipLlavaForConditionalGeneration",
        {
            "text_config": text("llama"), "vision_config": clip(), "image_token_index": IMAGE,
            "image_seq_length": 16, "vision_feature_layers": [-1, -2],
        },
        square_item(16, 16),
    ),
    Recipe(
        "LlavaNextForConditionalGeneration",
        {
            "text_config": text("mistral", sliding_window=None), "vision_config": clip(),
            "image_token_index": IMAGE, "image_grid_pinpoints": _PINPOINTS, "image_seq_length": 16,
        },
        unpadded_item(16, 4),
    ),
    Recipe(
        "LlavaNextVideoForConditionalGeneration",
        {
            "text_config": text("llama"), "vision_config": clip(), "image_token_index": IMAGE,
            "video_token_index": VIDEO, "image_grid_pinpoints": _PINPOINTS, "image_seq_length": 16,
        },
        unpadded_item(16, 4),
    ),
    Recipe(
        "VideoLlavaForConditionalGeneration",
        {
            "text_config": text("llama"), "vision_config": clip(), "image_token_index": IMAGE,
            "video_token_index": VIDEO, "image_seq_length": 16,
        },
        lambda number: Item(
            {"pixel_values_images": pixels(number, 1, 3, 16, 16)}, [START, *[IMAGE] * 16, END]
        ),
    ),
    Recipe(
        "LlavaOnevisionForConditionalGeneration",
        {
            "text_config": text("qwen2"), "vision_config": siglip(), "image_token_index": IMAGE,
            "video_token_index": VIDEO, "image_grid_pinpoints": _PINPOINTS,
        },
        unpadded_item(16, 4),
    ),
    Recipe(
        "InternVLForConditionalGeneration",
        {
            "text_config": text("qwen3"), "vision_config": tower(image_size=[16, 16], patch_size=[4, 4]),
            "image_token_id": IMAGE, "image_seq_length": 4,
        },
        square_item(16, 4),
    ),
    Recipe(
        "QianfanOCRForConditionalGeneration",
        {
            "text_config": text("qwen3"), "vision_config": tower(image_size=[16, 16], patch_size=[4, 4]),
            "image_token_id": IMAGE, "image_seq_length": 4,
        },
        square_item(16, 4),
    ),
    *(
        Recipe(
            f"{family}ForConditionalGeneration",
            {
                "text_config": text("llama"), "vision_config": tower(), "image_token_id": IMAGE,
                "scale_factor": 2, "pad_token_id": 0,
            },
            tiled_item(16, 4),
            join=_TILES,
        )
        for family in ("SmolVLM", "Idefics3")
    ),
    Recipe(
        "Idefics2ForConditionalGeneration",
        {
            "text_config": text("mistral", sliding_window=None), "vision_config": tower(),
            "image_token_id": IMAGE,
            "perceiver_config": {
                "hidden_size": HIDDEN, "resampler_n_latents": 4, "resampler_depth": 2,
                "resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2,
            },
        },
        lambda number: Item(
            {
                "pixel_values": pixels(number, 1, 1, 3, 16, 16),
                "pixel_attention_mask": torch.ones(1, 1, 16, 16, dtype=torch.long),
            },
            [START, *[IMAGE] * 4, END],
        ),
        join=_TILES,
    ),
    Recipe(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": text("mistral", sliding_window=None), "vision_config": _PIXTRAL,
            "image_token_index": IMAGE, "spatial_merge_size": 2, "multimodal_projector_bias": False,
        },
        pixtral_item,
    ),
    Recipe(
        "LightOnOcrForConditionalGeneration",
        {
            "text_config": text("qwen3"), "vision_config": _PIXTRAL, "image_token_id": IMAGE,
            "spatial_merge_size": 2,
        },
        pixtral_item,
    ),
    Recipe(
        "AyaVisionForConditionalGeneration",
        {
            "text_config": text("cohere2", logit_scale=0.25, **_WINDOWS), "vision_config": siglip(),
            "image_token_index": IMAGE, "downsample_factor": 2, "adapter_layer_norm_eps": 1e-6,
            "vision_feature_select_strategy": "full", "vision_feature_layer": -1,
        },
        square_item(16, 4),
    ),
    Recipe(
        "Cohere2VisionForConditionalGeneration",
        {
            "text_config": text("cohere2", **_WINDOWS), "vision_config": siglip(), "image_token_id": IMAGE,
            "alignment_intermediate_size": 48,
        },
        square_item(16, 4),
    ),
    Recipe(
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": text("deepseek_v3", **_MLA),
            "vision_config": tower(image_size=None, num_channels=None, pos_emb_height=8, pos_emb_width=8),
            "projection_hidden_size": 32, **{"image_token_id": IMAGE, "video_token_id": VIDEO},
        },
        grid_item(3, 4, 4),
    ),
    Recipe(
        "Llama4ForConditionalGeneration",
        {
            "text_config": text(
                num_hidden_layers=4, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1,
                interleave_moe_layer_step=2, attention_chunk_size=16, no_rope_layer_interval=4,
                floor_scale=8,
            ),
            "vision_config": tower(
                intermediate_size=128, vision_output_dim=32, projector_input_dim=32, projector_output_dim=32,
                pixel_shuffle_ratio=0.5,
            ),
            "image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END,
        },
        square_item(16, 4),
    ),
    Recipe(
        "Ovis2ForConditionalGeneration",
        {
            "text_config": text("qwen2"), "vision_config": tower(vocab_size=32, hidden_stride=2),
            "image_token_id": IMAGE, "visual_indicator_token_ids": [303, 304, 305, 306, 307],
            "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN,
        },
        square_item(16, 4, (303, 304), (305,)),
    ),
    Recipe(
        "AriaForConditionalGeneration",
        {
            "text_config": text(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            "vision_config": tower("idefics3_vision"), "projector_patch_to_query_dict": {16: 4},
            "image_token_index": IMAGE,
        },
        _aria_item,
    ),
    Recipe(
        "Exaone4_5_ForConditionalGeneration",
        {
            "text_config": text(
                "exaone4", num_hidden_layers=4, sliding_window=8,
                layer_types=["sliding_attention"] * 3 + ["full_attention"],
            ),
            "vision_config": qwen_tower(window_size=16, fullatt_block_indexes=[1], num_key_value_heads=2),
            "image_token_id": IMAGE, "video_token_id": VIDEO,
        },
        grid_item(),
    ),
    Recipe(
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "text_config": text(
                num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, dense_intermediate_size=96,
                shared_intermediate_size=32, rotary_dim=8,
            ),
            "vision_config": tower(image_size=32), "image_token_index": IMAGE, "video_token_index": VIDEO,
            "projector_hidden_size": HIDDEN,
        },
        grid_item(),
    ),
    Recipe(
        "VideoLlama3ForConditionalGeneration",
        {
            "text_config": text("qwen2"), "vision_config": tower(image_size=None), "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        _merged_item,
    ),
    Recipe(
        "Step3p7ForConditionalGeneration",
        {
            "text_config": text(
                sliding_window=8, layer_types=["full_attention", "sliding_attention", "full_attention"],
                n_routed_experts=8, num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                share_expert_dim=32,
            ),
            "vision_config": tower(image_size=32, mlp_ratio=1.5), "image_token_id": IMAGE,
        },
        square_item(32, 4),
    ),
    Recipe(
        "DeepseekVLForConditionalGeneration",
        {"text_config": text("llama"), "vision_config": siglip(), "image_token_id": IMAGE},
        square_item(16, 16),
    ),
    Recipe(
        "DeepseekVLHybridForConditionalGeneration",
        {
            "text_config": text("llama"), "vision_config": siglip(), "image_token_id": IMAGE,
            "high_res_vision_config": {
                "model_type": "sam_vision_model", "hidden_size": 32, "output_channels": 16, "image_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "window_size": 4,
                "global_attn_indexes": [1], "mlp_dim": 48,
            },
        },
        _two_scales_item,
    ),
    Recipe(
        "GotOcr2ForConditionalGeneration",
        {
            "text_config": text("qwen2"), "image_token_index": IMAGE, "image_seq_length": 4,
            "vision_config": {
                "hidden_size": 32, "output_channels": 16, "image_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 4, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1],
                "mlp_dim": 48,
            },
        },
        square_item(32, 4),
    ),
    Recipe(
        "DeepseekOcr2ForConditionalGeneration",
        {
            "text_config": text(
                n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
                mlp_layer_types=["dense", "sparse", "sparse"], head_dim=None,
            ),
            "vision_config": {
                "sam_config": {
                    "hidden_size": 32, "output_channels": 16, "image_size": 64, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1],
                    "mlp_dim": 48, "downsample_channels": [24, 32],
                },
                "encoder_config": {
                    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8,
                },
            },
            "image_token_id": IMAGE,
        },
        _half_item,
    ),
    Recipe(
        "JanusForConditionalGeneration",
        {
            "text_config": text("llama"), "image_token_id": IMAGE,
            "vision_config": tower(
                intermediate_size=None, projection_dim=HIDDEN, num_image_tokens=16, mlp_ratio=1.5
            ),
            "vq_config": {
                "embed_dim": 4, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32,
                "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": HIDDEN,
                "image_token_embed_dim": HIDDEN, "num_hidden_layers": 1,
            },
        },
        square_item(16, 16),
    ),
    Recipe(
        "Blip2ForConditionalGeneration",
        {
            "text_config": text(
                "opt", ffn_dim=96, word_embed_proj_dim=HIDDEN, head_dim=None, num_key_value_heads=None,
                intermediate_size=None,
            ),
            "vision_config": tower(num_channels=None),
            "qformer_config": {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
                "vocab_size": 8,
            },
            "num_query_tokens": 4, "image_token_index": IMAGE,
        },
        square_item(16, 4),
    ),
    *(
        Recipe(
            f"{family}ForConditionalGeneration",
            {
                "text_config": text(
                    num_hidden_layers=4, sliding_window=8,
                    **({"moe_hidden_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if family == "MuseSpark" else {}),
                ),
                "vision_config": tower(
                    image_size=None, num_channels=None, pos_emb_height=8, pos_emb_width=8,
                    max_position_embeddings=64,
                ),
                "image_token_id": IMAGE, "video_token_id": VIDEO, "out_hidden_size": 128,
                "projector_hidden_size": 48, **extra,
            },
            grid_item(),
        )
        for family, extra in (
            ("MuseGlimmer", {}),
            (
                "MuseSpark",
                {
                    "audio_token_id": AUDIO,
                    "audio_config": {
                        "patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1],
                        "num_hidden_layers": 2, "out_hidden_size": HIDDEN,
                    },
                },
            ),
        )
    ),
    Recipe(
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        {
            "text_config": text("hyperclovax"),
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                **qwen_tower(window_size=16, fullatt_block_indexes=[1]),
            },
            "image_token_id": IMAGE, "video_token_id": VIDEO,
        },
        grid_item(),
    ),
)
