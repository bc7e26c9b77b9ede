"""Recipes of classes with recurrent layers, and of those that take sound."""

from __future__ import annotations

from support.zoo.items import grid_item, sized_item, sound_item, strip_item
from support.zoo.recipe import (
    AUDIO,
    HIDDEN,
    IMAGE,
    MOE,
    QWEN_IDS,
    VIDEO,
    Config,
    qwen_tower,
    recipe,
    rope,
    text,
    tower,
)

# fmt: off
_LINEAR: Config = {
    "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, **rope((2, 1, 1), partial_rotary_factor=0.5),
}
_MINICPM: Config = {
    "insert_layer_id": 0, "image_token_id": IMAGE, "video_token_id": VIDEO, "join": {"pixel_values": 3},
}
_SIZES = ((4, 6), (8, 4), (6, 6))

HYBRIDS = (
    recipe("Qwen3_5", grid_item(), text(**_LINEAR), qwen_tower(num_position_embeddings=64), **QWEN_IDS),
    recipe("Qwen3_5Moe", grid_item(), text(shared_expert_intermediate_size=32, **_LINEAR, **MOE),
           qwen_tower(num_position_embeddings=64), **QWEN_IDS),
    recipe("MiniCPMV4_6", strip_item, text("qwen3_5_text", **_LINEAR), tower(image_size=32), image_size=32,
           **_MINICPM),
    recipe("MiniCPMV4_7", strip_item, text("qwen3_5_text", **_LINEAR), tower(image_size=32), image_size=32,
           **_MINICPM),
    recipe("MiniCPMOcr", strip_item, text("qwen3_5_text", **_LINEAR), tower(image_size=32),
           downsample_mode="16x", **_MINICPM),
    recipe("Lfm2Vl", sized_item(_SIZES, (48,), "spatial_shapes", padded=40),
           text("lfm2", conv_L_cache=3, layer_types=["conv", "full_attention", "conv"],
                block_auto_adjust_ff_dim=False),
           tower("siglip2_vision_model", image_size=None, num_patches=64, vision_use_head=False),
           image_token_id=IMAGE, projector_hidden_size=48),
    recipe("Lfm3Vl", grid_item(), text("lfm3", num_hidden_layers=5, sliding_window=8),
           tower(image_size=None, num_channels=None, num_key_value_heads=2), projector_hidden_size=48,
           **QWEN_IDS),
    recipe("NemotronH_Omni_Reasoning_V3", sized_item(_SIZES, (48,), "image_grid_hw"),
           text("nemotron_h", num_hidden_layers=None, ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16,
                layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], n_groups=2,
                chunk_size=8, expand=1, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32),
           {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 1.5,
            "patch_size": 4, "image_size": 32, "max_img_size": 64, "video_temporal_patch_size": 2},
           projector_hidden_size=48, vision_hidden_size=32, image_token_id=IMAGE, video_token_id=VIDEO,
           audio_token_id=AUDIO),
)

_WHISPER: Config = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "d_model": 32,
}
_TOWER: Config = {"num_mel_bins": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}

SOUNDS = (
    recipe("Voxtral", sound_item((16,) * 3, (2,) * 3), text("llama"), modality="audio", audio_token_id=AUDIO,
           audio_config={"model_type": "voxtral_encoder", "max_source_positions": 8, "intermediate_size": 128,
                         **_TOWER}),
    recipe("Qwen2Audio", sound_item((16, 8, 16), (4, 2, 4), "feature_attention_mask"), text("qwen2"),
           modality="audio", audio_token_index=AUDIO,
           audio_config={"model_type": "qwen2_audio_encoder", "max_source_positions": 8, **_WHISPER}),
    recipe("Qwen3ASR", sound_item((100, 50, 100), (13, 7, 13), "input_features_mask", padded=100),
           text("qwen3"),
           modality="audio", audio_token_id=AUDIO, pad_token_id=0, eos_token_id=2,
           audio_config={"model_type": "qwen3_asr_encoder", "n_window": 50, "n_window_infer": 100,
                         "output_dim": HIDDEN, "downsample_hidden_size": 16, "max_position_embeddings": 13,
                         **_WHISPER}),
    recipe("GlmAsr", sound_item((16, 8, 16), (2, 1, 2), "input_features_mask"), text("llama"),
           modality="audio",
           audio_token_id=AUDIO,
           audio_config={"model_type": "glmasr_encoder", "intermediate_size": 128,
                         "max_position_embeddings": 64, **_TOWER}),
    recipe("GraniteSpeech", sound_item((16,) * 3, (8,) * 3, swapped=True), text("granite"), modality="audio",
           audio_token_index=AUDIO, has_lora_adapter=False, downsample_rate=2, window_size=4,
           encoder_config={"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 4,
                           "output_dim": 12,
                           "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3},
           projector_config={"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "intermediate_size": 48, "encoder_hidden_size": 32}),
    recipe("FunAsrNano", sound_item((8, 5, 8), (8, 5, 8), "input_features_mask", padded=8, swapped=True),
           text("qwen3"), modality="audio", audio_token_id=AUDIO,
           audio_config={"model_type": "fun_asr_nano_encoder", "intermediate_size": 48,
                         "num_timestamp_prediction_layers": 1, "fsmn_kernel_size": 3, "num_stacked_frames": 1,
                         "max_position_embeddings": 65, **_TOWER},
           adaptor_config={"hidden_size": HIDDEN, "num_attention_heads": 4, "intermediate_size": 16,
                           "num_hidden_layers": 1, "projector_hidden_size": 48}),
)
