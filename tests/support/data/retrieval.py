"""Checkpoints for retrieval, and the vectors and scores that transformers' hidden states give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, Gemma3ForConditionalGeneration, Gemma3ForSequenceClassification

from support.data.checkpoints import build_checkpoint
from support.data.oracle import hidden_states
from support.zoo.checkpoint import checkpoint

#: The tokens by which `reranker` scores.
YES, NO = 41, 77
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


def reranker(folder: Path) -> Path:
    """The tiny Qwen3-VL as sentence-transformers writes a reranker."""
    scorer = build_checkpoint("qwen3_vl", folder) / "1_LogitScore"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": NO}))
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "path": scorer.name, "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def pooled(hidden: torch.Tensor, method: str = "last", *, normalize: bool = True) -> np.ndarray:
    """One vector of hidden states [T, hidden]."""
    vector = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[method]
    return (torch.nn.functional.normalize(vector, dim=-1) if normalize else vector).numpy()


def pair_score(
    path: Path,
    query: str,
    document: str | Sequence[Mapping[str, Any]],
    images: Sequence[Image.Image] = (),
    instruction: str = INSTRUCTION,
) -> float:
    """The score of Qwen's rerankers: their prompt, and the logits of two tokens after it."""
    parts: list[Mapping[str, Any]] = [
        {"type": "text", "text": text}
        for text in (f"<Instruct>: {instruction}", "<Query>:", query, "\n<Document>:")
    ]
    parts += [{"type": "text", "text": document}] if isinstance(document, str) else document
    messages: list[Mapping[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": parts},
    ]
    _, logits = hidden_states(path, messages, images)
    return float(torch.sigmoid(logits[-1, YES] - logits[-1, NO]))


def classifier(folder: Path) -> Any:
    """Writes the zoo's Gemma 3 with a head of one label; the model, as transformers has it."""
    source = checkpoint("Gemma3ForConditionalGeneration")
    shutil.copytree(source, folder)
    config = AutoConfig.from_pretrained(source, num_labels=1)
    torch.manual_seed(1)
    model = Gemma3ForSequenceClassification(config).eval()
    whole = Gemma3ForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    model.model.load_state_dict(whole.model.state_dict())
    model.save_pretrained(folder)
    return model
