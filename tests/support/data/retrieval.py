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


#: A reranker's own chat template in the manner of those on the hub: it writes three roles and no others.
TEMPLATE = (
    "{%- macro write(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content -%}{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- set told = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | list -%}"
    "{%- set query = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | list -%}"
    "{%- set document = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | list -%}"
    "<|im_start|>system\n" + SYSTEM + "<|im_end|>\n<|im_start|>user\n<Instruct>: "
    "{% if told %}{{ write(told[0]) }}{% else %}" + INSTRUCTION + "{% endif %}"
    "<Query>:{{ write(query[0]) if query else '' }}\n<Document>:{{ write(document[0]) if document else '' }}"
    "<|im_end|>\n{{ '<|im_start|>assistant\n' }}"
)


def reranker(folder: Path, template: str = "") -> Path:
    """The tiny Qwen3-VL as sentence-transformers writes a reranker, with a chat template of its own."""
    path = as_reranker(build_checkpoint("qwen3_vl", folder))
    if template:
        (path / "chat_template.jinja").write_text(template)
    return path


def as_reranker(path: Path) -> Path:
    """Adds the files of the published rerankers."""
    _modules(
        path,
        {
            "base.modules.transformer.Transformer": ("", None),
            "cross_encoder.modules.logit_score.LogitScore": (
                "1_LogitScore",
                {"true_token_id": YES, "false_token_id": NO},
            ),
        },
    )
    return path


def as_embedder(path: Path) -> Path:
    """Adds the files of the published embedding models."""
    pooling = {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}
    _modules(
        path,
        {
            "base.modules.transformer.Transformer": ("", None),
            "sentence_transformer.modules.pooling.Pooling": ("1_Pooling", pooling),
            "sentence_transformer.modules.normalize.Normalize": ("2_Normalize", None),
        },
    )
    return path


def _modules(path: Path, modules: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
    """Each by its class, with its folder and its configuration."""
    listed = []
    for index, (kind, (name, config)) in enumerate(modules.items()):
        listed.append(
            {"idx": index, "name": str(index), "path": name, "type": f"sentence_transformers.{kind}"}
        )
        (path / name).mkdir(exist_ok=True)
        if config is not None:
            (path / name / "config.json").write_text(json.dumps(config))
    (path / "modules.json").write_text(json.dumps(listed))


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
