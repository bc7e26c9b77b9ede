"""Requests of every model family through a whole cluster, compared with transformers' generate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.data.oracle import assert_exact
from support.data.pictures import picture
from support.data.traffic import ask_all, expected, mixed_cases
from support.encdec import traffic as encdec
from support.encdec.batches import checkpoint_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster

#: Families whose prompts have placeholders for pictures, and encoder-decoder families.
PICTURES = ("qwen3_vl", "qwen2_5_vl", "llava")
ENC_DEC = ("bart", "mbart", "t5", "whisper", "trocr")
FAMILIES = (*PICTURES, *ENC_DEC)

_TEXTS = (
    "The rain in Spain",
    "x",
    "A red circle beside a blue square, and nothing else in the picture",
    "Hi you",
)
_SOURCES: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("bart", "mbart", "t5"), _TEXTS),
    "trocr": [picture(seed, 70 + 9 * seed, 40) for seed in range(4)],
    "whisper": [(1.0 + seed, seed) for seed in range(4)],
}


async def assert_family_exact(cluster: Cluster, family: str, path: Path, *, tokens: int = 64) -> None:
    """Requests asked at once, of mixed lengths, are answered as by generate.

    `path` is the checkpoint that the cluster serves as `family`.
    """
    if family in PICTURES:
        await _assert_pictures(cluster, family, path, tokens)
    else:
        await _assert_encoded(cluster, family, path, tokens)


async def _assert_pictures(cluster: Cluster, family: str, path: Path, tokens: int) -> None:
    cases = mixed_cases(12, seed=11)
    answers = await ask_all(cluster.url, cases, tokens, model=family)
    assert_exact(expected(path, cases, tokens), [answer.token_ids for answer in answers])


async def _assert_encoded(cluster: Cluster, family: str, path: Path, tokens: int) -> None:
    prompt = tuple(checkpoint_of(family, "cpu").decoder.prompt_defaults({}).token_ids)
    cases = [EncDecCase(source, prompt) for source in _SOURCES[family]]
    answers = await asyncio.gather(*(encdec.ask(cluster.url, case, tokens, model=family) for case in cases))
    reference = encdec.expected(path, cases, tokens)
    # One answer of random weights may repeat itself; together they vary.
    assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=1)
    assert len({token for answer in answers for token in answer.token_ids}) >= 20
