"""What transformers answers for encoder-decoder checkpoints. Imports nothing of Triptych."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GenerationMixin,
    VisionEncoderDecoderModel,
    ViTImageProcessorPil,
)
from transformers.utils import logging

from support.data.oracle import OracleResult, digest, kept

#: Inputs of the encoder: {"input_ids": [1, n]}, {"input_features": [1, mels, frames]} or
#: {"pixel_values": [1, 3, height, width]}.
Inputs = Mapping[str, torch.Tensor]


@functools.lru_cache(maxsize=8)
def model_of(path: Path) -> Any:
    """The whole model in fp32, as transformers loads it."""
    logging.disable_progress_bar()
    kind: Any = AutoModelForSpeechSeq2Seq if is_audio(path) else AutoModelForSeq2SeqLM
    if _processor(path).get("image_processor_type"):
        # Its decoder knows no other attention.
        return VisionEncoderDecoderModel.from_pretrained(path, dtype=torch.float32).eval()
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def is_audio(path: Path) -> bool:
    """Whether the checkpoint hears rather than reads."""
    return "feature_extractor_type" in _processor(path)


def _processor(path: Path) -> dict[str, Any]:
    """preprocessor_config.json; a model that reads has none."""
    file = path / "preprocessor_config.json"
    values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return values


@functools.lru_cache(maxsize=8)
def tokenizer_of(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


def text_inputs(path: Path, text: str) -> Inputs:
    """What transformers' tokenizer makes of a text."""
    return {"input_ids": tokenizer_of(path)(text, return_tensors="pt")["input_ids"]}


def image_inputs(path: Path, image: Image.Image) -> Inputs:
    """What transformers' processor makes of a picture."""
    pixels = ViTImageProcessorPil.from_pretrained(path)(images=[image], return_tensors="pt")
    return {"pixel_values": pixels["pixel_values"]}


def audio_inputs(path: Path, waveform: Any) -> Inputs:
    """Features of a whole waveform at the model's rate: padded to its window, or longer ones as they are."""
    extractor = AutoFeatureExtractor.from_pretrained(path)
    options: dict[str, Any] = {}
    if len(waveform) > extractor.n_samples:
        options = {"truncation": False, "padding": "longest"}
    features = extractor(waveform, sampling_rate=extractor.sampling_rate, return_tensors="pt", **options)
    return {"input_features": features["input_features"]}


@torch.no_grad()
def encoder_rows(path: Path, inputs: Inputs) -> torch.Tensor:
    """[rows, width] of the encoder's last layer."""
    rows: torch.Tensor = model_of(path).get_encoder()(**inputs).last_hidden_state[0]
    return rows


@torch.no_grad()
def decoder_logits(path: Path, inputs: Inputs, decoder_ids: list[int]) -> torch.Tensor:
    """Teacher-forced logits [len(decoder_ids), vocabulary]."""
    logits: torch.Tensor = model_of(path)(**inputs, decoder_input_ids=torch.tensor([decoder_ids])).logits[0]
    return logits


def greedy(
    path: Path,
    inputs: Inputs,
    *,
    max_new_tokens: int,
    decoder_ids: list[int] | None = None,
    ignore_eos: bool = True,
    **options: Any,
) -> OracleResult:
    """`generate(num_beams=1)` with the checkpoint's own generation_config; `options` go over it.

    `prompt_token_ids` are the decoder's; a forced first token is among the output. Whisper's own `generate`,
    which goes on from window to window, is not asked: see `whisper_generate`.
    """
    given = (max_new_tokens, decoder_ids, ignore_eos)
    words = repr([*given, sorted(options.items()), {name: part.shape for name, part in inputs.items()}])
    tensors = (part.numpy().tobytes() for part in inputs.values())
    question = (Path(__file__).read_bytes(), digest(path), words.encode(), *tensors)
    return OracleResult(**kept(question, lambda: asdict(_generated(path, inputs, *given, options))))


@torch.no_grad()
def _generated(
    path: Path,
    inputs: Inputs,
    max_new_tokens: int,
    decoder_ids: list[int] | None,
    ignore_eos: bool,
    options: Mapping[str, Any],
) -> OracleResult:
    model = model_of(path)
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.max_length, config.num_beams, config.do_sample = (
        max_new_tokens,
        None,
        1,
        False,
    )
    config.return_dict_in_generate = config.output_scores = True
    config.forced_eos_token_id = None
    if ignore_eos:
        config.eos_token_id = None
    for name, value in options.items():
        setattr(config, name, value)
    given = {} if decoder_ids is None else {"decoder_input_ids": torch.tensor([decoder_ids])}
    # What the call's config leaves out is taken from the model's own.
    own = copy.deepcopy(model.generation_config)
    if ignore_eos:
        model.generation_config.eos_token_id = None
    try:
        out = GenerationMixin.generate(model, **inputs, **given, generation_config=config)
    finally:
        model.generation_config = own
    best = torch.stack(out.scores)[:, 0].topk(2, dim=-1)
    prompt = len(out.sequences[0]) - len(out.scores)
    ids = out.sequences[0].tolist()
    return OracleResult(
        prompt_token_ids=ids[:prompt],
        token_ids=ids[prompt:],
        margins=(best.values[:, 0] - best.values[:, 1]).tolist(),
        runners_up=best.indices[:, 1].tolist(),
    )
