"""vLLM, our encoder worker and their store together: pictures, requests and what must be answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image

from support.data.oracle import OracleResult, assert_exact, oracle
from support.data.pictures import picture
from support.processes.cluster import data_url
from support.stores.server import StoreServer
from support.vllm_engine.encoders import EncoderProcess
from support.vllm_engine.server import VllmServer

TOKENS = 32
TEXT = {"type": "text", "text": "Describe what import os does, in one sentence."}
PATCH = 8

_seeds = count(1000)


@dataclass
class Fleet:
    """vLLM, our encoder worker and their store."""

    checkpoint: Path
    store: StoreServer
    encoder: EncoderProcess
    vllm: VllmServer


def fresh(width: int = 64, height: int = 64) -> Image.Image:
    """A picture that no test has used."""
    return picture(next(_seeds), width, height)


def stored(fleet: Fleet, image: Image.Image, grid: Sequence[int] = (), uuid: str = "") -> dict[str, Any]:
    """A part that names the picture's embedding and has no pixels."""
    size = list(grid) or [1, image.height // PATCH, image.width // PATCH]
    return {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": size},
        "uuid": uuid or fleet.encoder.key(image),
    }


def raw(image: Image.Image, uuid: str = "") -> dict[str, Any]:
    """A part with the picture itself."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}} | ({"uuid": uuid} if uuid else {})


def ask(fleet: Fleet, *parts: dict[str, Any]) -> dict[str, Any]:
    return dict(fleet.vllm.ask([*parts, TEXT], TOKENS))


def reference(fleet: Fleet, *images: Image.Image) -> OracleResult:
    content = [*({"type": "image"} for _ in images), TEXT]
    return oracle(fleet.checkpoint, [{"role": "user", "content": content}], images, max_new_tokens=TOKENS)


def assert_as_generate(fleet: Fleet, answers: Sequence[dict[str, Any]], images: Sequence[Any]) -> None:
    assert [answer["status"] for answer in answers] == [200] * len(answers), answers
    references = [reference(fleet, *each) for each in images]
    assert_exact(references, [answer["token_ids"] for answer in answers], min_distinct=1)
