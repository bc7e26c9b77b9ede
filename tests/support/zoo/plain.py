"""Recipes of classes with one row of positions and attention to earlier tokens alone."""

from __future__ import annotations

from support.zoo.items import (
    codes_item,
    grid_item,
    merged_item,
    patches_item,
    pixtral_item,
    square_item,
    tiled_item,
    two_scales_item,
    unpadded_item,
)
from support.zoo.recipe import (
    AUDIO,
    END,
    HIDDEN,
    IMAGE,
    START,
    VIDEO,
    VOCAB_SIZE,
    Config,
    clip,
    qwen_tower,
    recipe,
    siglip,
    text,
    tower,
)

# fmt: off
_PINPOINTS: Config = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_SLIDING = "sliding_attention"
_WINDOWS: Config = {"sliding_window": 8, "layer_types": [_SLIDING, "full_attention", _SLIDING]}
_PIXTRAL = tower("pixtral", head_dim=8, image_size=32)
_PIXEL_SHUFFLE = tower(image_size=[16, 16], patch_size=[4, 4])
_TILES: Config = {"pixel_values": 1, "pixel_attention_mask": 1}
_IMAGE: Config = {"image_token_id": IMAGE}
_INDEX: Config = {"image_token_index": IMAGE}
_BOTH: Config = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_BOTH_INDICES: Config = {"image_token_index": IMAGE, "video_token_index": VIDEO}
_PLACES: Config = {"pos_emb_height": 8, "pos_emb_width": 8}
_EXPERTS: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA: Config = {
    "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, **_EXPERTS,
}
_SAM: Config = {
    "hidden_size": 32, "output_channels": 16, "image_size": 64, "num_hidden_layers": 2, "patch_size": 4,
    "num_attention_heads": 4, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 48,
}
_MUSE_TOWER = tower(image_size=None, num_channels=None, max_position_embeddings=64, **_PLACES)
_MUSE: Config = {**_BOTH, "out_hidden_size": 128, "projector_hidden_size": 48}

PLAIN = (
    recipe("Llava", square_item(16, 16), text("llama"), clip(), image_seq_length=16, **_INDEX),
    recipe("VipLlava", square_item(16, 16), text("llama"), clip(), image_seq_length=16,
           vision_feature_layers=[-1, -2], **_INDEX),
    recipe("LlavaNext", unpadded_item(16, 4), text("mistral", sliding_window=None), clip(),
           image_seq_length=16, **_INDEX, **_PINPOINTS),
    recipe("LlavaNextVideo", unpadded_item(16, 4), text("llama"), clip(), image_seq_length=16,
           **_BOTH_INDICES, **_PINPOINTS),
    recipe("VideoLlava", square_item(16, 16, key="pixel_values_images"), text("llama"), clip(),
           image_seq_length=16, **_BOTH_INDICES),
    recipe("LlavaOnevision", unpadded_item(16, 4), text("qwen2"), siglip(), one_item=True, **_BOTH_INDICES,
           **_PINPOINTS),
    recipe("InternVL", square_item(16, 4), text("qwen3"), _PIXEL_SHUFFLE, image_seq_length=4, **_IMAGE),
    recipe("QianfanOCR", square_item(16, 4), text("qwen3"), _PIXEL_SHUFFLE, image_seq_length=4, **_IMAGE),
    recipe("SmolVLM", tiled_item(16, 4), text("llama"), tower(), scale_factor=2, pad_token_id=0, join=_TILES,
           **_IMAGE),
    recipe("Idefics3", tiled_item(16, 4), text("llama"), tower(), scale_factor=2, pad_token_id=0, join=_TILES,
           **_IMAGE),
    recipe("Idefics2", square_item(16, 4, tiles=True, ones={"pixel_attention_mask": (1, 1, 16, 16)}),
           text("mistral", sliding_window=None), tower(), join=_TILES, **_IMAGE,
           perceiver_config={"hidden_size": HIDDEN, "resampler_n_latents": 4, "resampler_depth": 2,
                             "resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2}),
    recipe("Mistral3", pixtral_item, text("mistral", sliding_window=None), _PIXTRAL, spatial_merge_size=2,
           multimodal_projector_bias=False, **_INDEX),
    recipe("LightOnOcr", pixtral_item, text("qwen3"), _PIXTRAL, spatial_merge_size=2, **_IMAGE),
    recipe("AyaVision", square_item(16, 4), text("cohere2", logit_scale=0.25, **_WINDOWS), siglip(),
           downsample_factor=2, adapter_layer_norm_eps=1e-6, vision_feature_select_strategy="full",
           vision_feature_layer=-1, **_INDEX),
    recipe("Cohere2Vision", square_item(16, 4), text("cohere2", **_WINDOWS), siglip(),
           alignment_intermediate_size=48, **_IMAGE),
    recipe("Kimi_K25", grid_item(3, 4, 4), text("deepseek_v3", **_MLA),
           tower(image_size=None, num_channels=None, **_PLACES), projection_hidden_size=32, **_BOTH),
    recipe("Llama4", square_item(16, 4),
           text(num_hidden_layers=4, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1,
                interleave_moe_layer_step=2, attention_chunk_size=16, no_rope_layer_interval=4),
           tower(intermediate_size=128, vision_output_dim=32, projector_input_dim=32, projector_output_dim=32,
                 pixel_shuffle_ratio=0.5),
           boi_token_index=START, eoi_token_index=END, **_INDEX),
    recipe("Ovis2", square_item(16, 4, (303, 304), (305,)), text("qwen2"),
           tower(vocab_size=32, hidden_stride=2),
           visual_indicator_token_ids=[303, 304, 305, 306, 307], vocab_size=VOCAB_SIZE, hidden_size=HIDDEN,
           **_IMAGE),
    recipe("Aria", square_item(16, 4, ones={"pixel_mask": (1, 16, 16)}),
           text(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1), tower("idefics3_vision"),
           projector_patch_to_query_dict={16: 4}, **_INDEX),
    recipe("Exaone4_5_", grid_item(),
           text("exaone4", num_hidden_layers=4, sliding_window=8,
                layer_types=["sliding_attention"] * 3 + ["full_attention"]),
           qwen_tower(window_size=16, fullatt_block_indexes=[1], num_key_value_heads=2), **_BOTH),
    recipe("MiniMaxM3Sparse", grid_item(),
           text(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, dense_intermediate_size=96,
                shared_intermediate_size=32, rotary_dim=8),
           tower(image_size=32), projector_hidden_size=HIDDEN, **_BOTH_INDICES),
    recipe("VideoLlama3", merged_item, text("qwen2"), tower(image_size=None), **_BOTH),
    recipe("Step3p7", square_item(32, 4),
           text(sliding_window=8, layer_types=["full_attention", "sliding_attention", "full_attention"],
                n_routed_experts=8, num_local_experts=8, share_expert_dim=32, **_EXPERTS),
           tower(image_size=32, mlp_ratio=1.5), **_IMAGE),
    recipe("DeepseekVL", square_item(16, 16), text("llama"), siglip(), **_IMAGE),
    recipe("DeepseekVLHybrid", two_scales_item, text("llama"), siglip(),
           high_res_vision_config={"model_type": "sam_vision_model", **_SAM}, **_IMAGE),
    recipe("GotOcr2", square_item(32, 4), text("qwen2"), {**_SAM, "image_size": 32}, image_seq_length=4,
           **_INDEX),
    # Its tower asks 144 queries of a picture of up to 144 patches, and one row parts the views.
    recipe("DeepseekOcr2", square_item(64, 145),
           text(n_routed_experts=8, n_shared_experts=1, mlp_layer_types=["dense", "sparse", "sparse"],
                head_dim=None, **_EXPERTS),
           {"sam_config": {**_SAM, "patch_size": 8, "downsample_channels": [24, 32]},
            "encoder_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8}},
           **_IMAGE),
    recipe("Janus", square_item(16, 16), text("llama"),
           tower(intermediate_size=None, projection_dim=HIDDEN, num_image_tokens=16, mlp_ratio=1.5),
           vq_config={"embed_dim": 4, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32,
                      "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": HIDDEN,
                      "image_token_embed_dim": HIDDEN, "num_hidden_layers": 1},
           **_IMAGE),
    recipe("Blip2", square_item(16, 4),
           text("opt", ffn_dim=96, word_embed_proj_dim=HIDDEN, head_dim=None, num_key_value_heads=None,
                intermediate_size=None),
           tower(num_channels=None), num_query_tokens=4, needs_item=True, **_INDEX,
           qformer_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                           "intermediate_size": 48, "vocab_size": 8}),
    recipe("MuseGlimmer", grid_item(), text(num_hidden_layers=4, sliding_window=8), _MUSE_TOWER, **_MUSE),
    recipe("MuseSpark", grid_item(),
           text(num_hidden_layers=4, sliding_window=8, moe_hidden_size=32, num_local_experts=8, **_EXPERTS),
           _MUSE_TOWER, audio_token_id=AUDIO,
           audio_config={"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1],
                         "num_hidden_layers": 2, "out_hidden_size": HIDDEN},
           **_MUSE),
    recipe("HyperCLOVAXVisionV2", grid_item(), text("hyperclovax"),
           {"model_type": "qwen2_5_vl_vision", **qwen_tower(window_size=16, fullatt_block_indexes=[1])},
           **_BOTH),
    recipe("FuyuForCausalLM", patches_item, text("persimmon", num_key_value_heads=None, head_dim=None),
           patch_size=4, num_channels=3, image_size=32, **_IMAGE),
    recipe("Apertus1p5", codes_item, text("apertus1p5_text", head_dim=None),
           {"codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32,
            "channel_multiplier": [1, 1, 2], "num_res_blocks": 1, "attn_resolutions": [4], "resolution": 16},
           audio_config={"model_type": "wavtokenizer_encoder", "num_filters": 2, "upsampling_ratios": [2, 2],
                         "num_lstm_layers": 1, "hidden_size": 8, "codebook_size": 16, "codebook_dim": 8},
           image_token_offset=262, audio_token_offset=278, audio_token_id=AUDIO, **_IMAGE),
)
