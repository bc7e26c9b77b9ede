"""The audio demo's configuration, and how its checkpoint folder is written."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from examples.demo_models.audio.recordings import WINDOW_SECONDS
from examples.demo_models.audio.tokens import END, NO_TIMES, START

MELS = 80
_WIDTH = 96
_POSITIONS = 24  # of the decoder: eight digits, three times, the prompt, and room


def make_extractor() -> WhisperFeatureExtractor:
    """Whisper's own features, in windows of 5 s instead of 30 s."""
    return WhisperFeatureExtractor(feature_size=MELS, chunk_length=WINDOW_SECONDS)


def make_config(tokenizer: WhisperTokenizer) -> WhisperConfig:
    """Whisper at 0.6 million parameters, English only."""
    end, start = (tokenizer.convert_tokens_to_ids(token) for token in (END, START))
    return WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=MELS,
        d_model=_WIDTH,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=3 * _WIDTH,
        decoder_ffn_dim=3 * _WIDTH,
        max_source_positions=50 * WINDOW_SECONDS,
        max_target_positions=_POSITIONS,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )


def make_generation_config(tokenizer: WhisperTokenizer) -> GenerationConfig:
    end, start, none = (tokenizer.convert_tokens_to_ids(token) for token in (END, START, NO_TIMES))
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        no_timestamps_token_id=none,
        is_multilingual=False,
        return_timestamps=False,
        max_length=_POSITIONS,
        do_sample=False,
    )


def make_model(tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    """Fresh weights. Half of the encoder's positions are Whisper's waves, half mark the order.

    A timestamp's token begins as its time's waves, so that near times are alike from the start.
    """
    model = WhisperForConditionalGeneration(make_config(tokenizer)).float()
    encoder = model.model.encoder
    rows, width = encoder.embed_positions.weight.shape
    at = torch.arange(rows) / rows
    count = width // 2
    with torch.no_grad():
        ramps = ((at[:, None] * count - torch.arange(count)) / 1.5).clamp(-1, 1)
        encoder.embed_positions.weight[:, count:] = ramps
        first = tokenizer.convert_tokens_to_ids(NO_TIMES) + 1
        tokens = model.model.decoder.embed_tokens.weight
        times = (torch.arange(len(tokens) - first) / rows)[:, None]
        waves = torch.pi * times * torch.arange(1, width // 2 + 1)
        tokens[first:] = 0.05 * torch.cat((waves.sin(), waves.cos()), dim=1) * math.sqrt(2)
    encoder.embed_positions.requires_grad_(True)
    return model


def save_checkpoint(
    model: WhisperForConditionalGeneration, tokenizer: WhisperTokenizer, folder: Path
) -> None:
    """A transformers checkpoint folder; the weights go in as fp16, the model stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = "float16"
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(folder)
    make_generation_config(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_extractor().save_pretrained(folder)
    weights = {
        name: parameter.detach().to(torch.float16).contiguous()
        for name, parameter in model.named_parameters()
    }
    partial = folder / "model.safetensors.new"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
