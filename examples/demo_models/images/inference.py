"""Answers from the demo model in this process, or from a server with an OpenAI-compatible API."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from triptych.apps.launch.model_path import DEMO_MODEL

MODEL_ID = "demo"
_MOST_TOKENS = 96
_BATCH = 32


@dataclass(frozen=True)
class Request:
    """PNG files and a question about them."""

    pictures: tuple[bytes, ...]
    question: str


class Answerer(Protocol):
    def answer(self, requests: Sequence[Request]) -> list[str]: ...


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def chat_body(request: Request, model: str = MODEL_ID, max_tokens: int = 64) -> dict[str, Any]:
    """The request as an OpenAI chat completion: the pictures, then the question."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in request.pictures
    ]
    parts.append({"type": "text", "text": request.question})
    return {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }


class InProcess:
    """transformers with the stored weights widened to fp32, greedy."""

    def __init__(self, folder: Path = DEMO_MODEL) -> None:
        import torch
        from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()
        self._image = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._pad = self._tokenizer.pad_token_id

    def _prompt(self, request: Request, grids: Sequence[Sequence[int]]) -> list[int]:
        """Token ids of the chat template's prompt, one image token per 2x2 patches."""
        messages = chat_body(request)["messages"]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = []
        counts = [t * h * w // 4 for t, h, w in grids]
        for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids += [token] * (counts.pop(0) if token == self._image else 1)
        return ids

    def _answer_batch(self, requests: Sequence[Request]) -> list[str]:
        torch = self._torch
        inputs: dict[str, Any] = {}
        pixels, grids, prompts = [], [], []
        for request in requests:
            own: list[list[int]] = []
            for picture in request.pictures:
                image = Image.open(io.BytesIO(picture))
                made = self._processor(images=[image], return_tensors="pt")
                pixels.append(made["pixel_values"])
                own += made["image_grid_thw"].tolist()
            prompts.append(self._prompt(request, own))
            grids += own
        length = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[self._pad] * (length - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels)
            inputs["image_grid_thw"] = torch.tensor(grids)
            inputs["mm_token_type_ids"] = (ids == self._image).int()
        with torch.no_grad():
            out = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=_MOST_TOKENS, **inputs
            )
        texts = self._tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
        return [str(text) for text in texts]

    def answer(self, requests: Sequence[Request]) -> list[str]:
        """Answers in the order of the requests; batches hold requests of like length."""
        order = sorted(range(len(requests)), key=lambda k: len(requests[k].pictures))
        answers = [""] * len(requests)
        for start in range(0, len(order), _BATCH):
            some = order[start : start + _BATCH]
            for k, text in zip(some, self._answer_batch([requests[k] for k in some]), strict=True):
                answers[k] = text
        return answers


class Http:
    """POST /v1/chat/completions, some requests at a time."""

    def __init__(self, url: str, model: str = MODEL_ID, concurrency: int = 8) -> None:
        self._url, self._model = url.rstrip("/") + "/v1/chat/completions", model
        self._concurrency = concurrency

    def _one(self, request: Request) -> str:
        body = json.dumps(chat_body(request, self._model, _MOST_TOKENS)).encode()
        post = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(post, timeout=120) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"])

    def answer(self, requests: Sequence[Request]) -> list[str]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(self._one, requests))
