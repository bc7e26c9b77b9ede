"""Builders of the tiny random encoder-decoder checkpoints; `checkpoints.py` writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from support.encdec import tokenizers as styles

HIDDEN = 64
#: What all configs but T5's and TrOCR's have in common.
SIZES: dict[str, Any] = {
    "d_model": HIDDEN, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """A model with its tokenizer; `processor` is preprocessor_config.json, `generation` adds to its file."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: dict[str, Any] | None
    generation: dict[str, Any] = field(default_factory=dict)
    randomise: Callable[[str, torch.Tensor], float] | None = None
    #: Token ids that the model shall seldom say.
    seldom: tuple[int, ...] = ()


def _bart(traits: frozenset[str]) -> Parts:
    tokenizer = styles.bart_tokenizer(600)
    config = BartConfig(
        vocab_size=len(tokenizer),
        encoder_layers=3,
        max_position_embeddings=256,
        scale_embedding="scaled" in traits,
        **SIZES,
    )
    generation = {
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
    }
    if "summary" in traits:
        generation |= {"no_repeat_ngram_size": 3, "min_length": 12, "num_beams": 4, "max_length": 62}
    return Parts(BartForConditionalGeneration(config), tokenizer, None, generation, _scale)


def _mbart(traits: frozenset[str]) -> Parts:
    """Its outputs begin with the end token and that of a language."""
    tokenizer = styles.bart_tokenizer(600, language="<mask>")
    config = MBartConfig(
        vocab_size=len(tokenizer),
        encoder_layers=2,
        max_position_embeddings=256,
        scale_embedding="scaled" in traits,
        **SIZES,
    )
    generation = {"bos_token_id": 0, "decoder_start_token_id": 2, "forced_bos_token_id": 4}
    return Parts(MBartForConditionalGeneration(config), tokenizer, None, generation, _whisper_scale)


def _trocr(traits: frozenset[str]) -> Parts:
    """A tower narrower than its decoder."""
    tokenizer = styles.bart_tokenizer(600)
    tower = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=48,
        patch_size=8,
    )
    text = TrOCRConfig(
        vocab_size=len(tokenizer),
        d_model=HIDDEN,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        max_position_embeddings=128,
        cross_attention_hidden_size=48,
        is_decoder=True,
        add_cross_attention=True,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(tower, text)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 1, 2
    config.dtype = "float32"
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 48, "width": 48},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    generation = {"bos_token_id": 0, "decoder_start_token_id": 2}
    return Parts(VisionEncoderDecoderModel(config), tokenizer, processor, generation, _scale)


def _whisper(traits: frozenset[str]) -> Parts:
    """Windows of 30 s as all of its kind have; `small` takes 2 s."""
    tokenizer = styles.whisper_tokenizer(420)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in styles.WHISPER_SPECIALS}
    end, start, no_times = ids["<|endoftext|>"], ids["<|startoftranscript|>"], ids["<|notimestamps|>"]
    seconds = 2 if "small" in traits else 30
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=20,
        encoder_layers=2,
        max_source_positions=50 * seconds,
        max_target_positions=448,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **SIZES,
    )
    specials = [ids[text] for text in styles.WHISPER_SPECIALS if text not in ("<|endoftext|>",)]
    times = range(no_times + 1, len(tokenizer))
    generation = {
        "bos_token_id": end,
        "decoder_start_token_id": start,
        "begin_suppress_tokens": [220, end],
        "suppress_tokens": [7, 8, *specials],
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": ids[f"<|{name}|>"] for name in styles.WHISPER_LANGUAGES},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": no_times,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "max_length": 448,
    }
    processor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 20,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": seconds,
        "n_fft": 400,
    }
    model = WhisperForConditionalGeneration(config)
    return Parts(model, tokenizer, processor, generation, _whisper_scale, tuple(times))


def _whisper_scale(name: str, parameter: torch.Tensor) -> float:
    """Standard deviation of a matrix or kernel; as in `_scale`."""
    if "positions" in name:
        return 2.0 if "decoder" in name else 1.0
    if "embed_tokens" in name:
        return 0.15
    gain = 1.4
    if "fc2" in name:
        gain = 0.2
    elif "out_proj" in name:
        gain = 1.0 if "encoder_attn" in name else 0.7
    return float(gain / parameter[0].numel() ** 0.5)


def _t5(traits: frozenset[str]) -> Parts:
    """As version 1.1, gated and with a head of its own; `tied` is version 1.0, `even` has four heads."""
    tokenizer = styles.t5_tokenizer(600)
    tied = "tied" in traits
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=HIDDEN,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=4 if "even" in traits else 5,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=24,
        feed_forward_proj="relu" if tied else "gated-gelu",
        tie_word_embeddings=tied,
        decoder_start_token_id=0,
        dtype="float32",
    )
    model = T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    scale = _tied_t5_scale if tied else _t5_scale
    return Parts(model, tokenizer, None, {"decoder_start_token_id": 0}, scale)


def _t5_scale(name: str, parameter: torch.Tensor) -> float:
    """Standard deviation of a matrix; scores are not scaled, and the bias must decide among keys."""
    if "relative_attention_bias" in name:
        return 3.0
    if "shared" in name or "embed_tokens" in name:
        return 1.0
    gain = 1.4
    if name.endswith((".q.weight", ".k.weight")):
        gain = 0.8
    elif name.endswith(".wo.weight"):
        gain = 0.5
    elif name.endswith(".o.weight"):
        gain = 1.0 if "EncDecAttention" in name else 3.0
    elif "lm_head" in name:
        gain = 3.0
    return float(gain / parameter[0].numel() ** 0.5)


def _tied_t5_scale(name: str, parameter: torch.Tensor) -> float:
    """As untied, but what the blocks add outweighs the token, which the head would else say again."""
    if "shared" in name or "embed_tokens" in name:
        return 0.3
    louder = 2.0 if name.endswith((".o.weight", ".wo.weight")) else 1.0
    return louder * _t5_scale(name, parameter)


def _scale(name: str, parameter: torch.Tensor) -> float:
    """Standard deviation of a matrix.

    Positions outweigh tokens, and feed-forward layers, whose outputs all lean to one side, are weak: else
    greedy output repeats one token, since the head is the embedding.
    """
    if "positions" in name:
        return 2.0
    if "shared" in name or "embed_tokens" in name:
        return 0.1
    gain = 1.4
    if "q_proj" in name or "k_proj" in name:
        gain = 1.5
    elif "fc2" in name:
        gain = 0.2
    elif "out_proj" in name:
        gain = 0.4
    return float(gain / parameter[0].numel() ** 0.5)


BUILDERS: dict[str, Callable[[frozenset[str]], Parts]] = {
    "bart": _bart,
    "mbart": _mbart,
    "t5": _t5,
    "trocr": _trocr,
    "whisper": _whisper,
}
FAMILIES = tuple(BUILDERS)
#: Hub spelling of a key, by family, as in checkpoints.py.
HUB_KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(FAMILIES, ()),
    "bart": ((r"^model\.", ""),),
    "trocr": (
        *(
            (rf"^encoder\.layers\.(\d+)\.{name}\.", rf"encoder.encoder.layer.\1.{hub}.")
            for name, hub in (
                (r"attention\.q_proj", "attention.attention.query"),
                (r"attention\.k_proj", "attention.attention.key"),
                (r"attention\.v_proj", "attention.attention.value"),
                (r"attention\.o_proj", "attention.output.dense"),
                (r"mlp\.fc1", "intermediate.dense"),
                (r"mlp\.fc2", "output.dense"),
            )
        ),
        (r"^encoder\.layers\.", "encoder.encoder.layer."),
    ),
}
