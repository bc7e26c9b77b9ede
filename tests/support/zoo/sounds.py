"""Recipes of classes that take sound."""

from __future__ import annotations

import torch

from support.zoo.recipe import AUDIO, AUDIO_END, AUDIO_START, HIDDEN, START, Item, Recipe, pixels, sound_item, text

_WHISPER = {
    "num_mel_bins": 16, "max_source_positions": 8, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "d_model": 32,
}  # fmt: skip
_QWEN_ASR_TOWER = {name: value for name, value in _WHISPER.items() if name != "max_source_positions"}


def _whole_sound(number: int) -> Item:
    """Frames before their mel bins, without a mask."""
    return Item({"input_features": pixels(number, 1, 16, 16)}, [AUDIO_START, *[AUDIO] * 8, AUDIO_END])


def _stacked_sound(number: int) -> Item:
    frames = (8, 5, 8)[number]
    tensors = {
        "input_features": pixels(number, 1, 8, 16),
        "input_features_mask": (torch.arange(8) < frames).int()[None],
    }
    return Item(tensors, [AUDIO_START, *[AUDIO] * frames, AUDIO_END])


SOUNDS = (
    Recipe(
        "VoxtralForConditionalGeneration",
        {
            "text_config": text("llama"), "audio_token_id": AUDIO,
            "audio_config": {
                "model_type": "voxtral_encoder", "num_mel_bins": 16, "max_source_positions": 8,
                "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                "hidden_size": 32,
            },
        },
        sound_item(16, 2, START),
        "audio",
    ),
    Recipe(
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": text("qwen2"), "audio_token_index": AUDIO,
            "audio_config": {"model_type": "qwen2_audio_encoder", **_WHISPER},
        },
        sound_item(16, 4, START, mask="feature_attention_mask"),
        "audio",
    ),
    Recipe(
        "Qwen3ASRForConditionalGeneration",
        {
            "text_config": text("qwen3"), "audio_token_id": AUDIO, "pad_token_id": 0, "eos_token_id": 2,
            "audio_config": {
                "model_type": "qwen3_asr_encoder", **_QWEN_ASR_TOWER, "n_window": 4, "n_window_infer": 8,
                "output_dim": HIDDEN, "downsample_hidden_size": 16, "max_position_embeddings": 13,
            },
        },
        sound_item(16, 2, mask="input_features_mask"),
        "audio",
    ),
    Recipe(
        "GlmAsrForConditionalGeneration",
        {
            "text_config": text("llama"), "audio_token_id": AUDIO,
            "audio_config": {
                "model_type": "glmasr_encoder", "num_mel_bins": 16, "num_hidden_layers": 2,
                "num_attention_heads": 4, "intermediate_size": 128, "hidden_size": 32,
                "max_position_embeddings": 64,
            },
        },
        sound_item(16, 2, mask="input_features_mask"),
        "audio",
    ),
    Recipe(
        "GraniteSpeechForConditionalGeneration",
        {
            "text_config": text("granite"), "audio_token_index": AUDIO, "has_lora_adapter": False,
            "downsample_rate": 2, "window_size": 4,
            "encoder_config": {
                "input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "output_dim": 12,
                "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3,
            },
            "projector_config": {
                "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 4, "intermediate_size": 48, "encoder_hidden_size": 32,
            },
        },
        _whole_sound,
        "audio",
    ),
    Recipe(
        "FunAsrNanoForConditionalGeneration",
        {
            "text_config": text("qwen3"), "audio_token_id": AUDIO,
            "audio_config": {
                "model_type": "fun_asr_nano_encoder", "num_mel_bins": 16, "hidden_size": 32,
                "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_timestamp_prediction_layers": 1, "fsmn_kernel_size": 3, "num_stacked_frames": 1,
                "max_position_embeddings": 65,
            },
            "adaptor_config": {
                "hidden_size": HIDDEN, "num_attention_heads": 4, "intermediate_size": 32,
                "num_hidden_layers": 1, "projector_hidden_size": 48,
            },
        },
        _stacked_sound,
        "audio",
    ),
)
