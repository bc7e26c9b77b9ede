"""Requests of every model family through a whole cluster, compared with transformers' generate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.data.oracle import MIN_DISTINCT, OracleResult, assert_exact
from support.data.pictures import picture
from support.data.traffic import Case, ask, expected, mixed_cases
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


FamilyCase = Case | EncDecCase


async def assert_family_exact(cluster: Cluster, family: str, path: Path, *, tokens: int = 64) -> None:
    """Requests asked at once, of mixed lengths, are answered as by generate.

    `path` is the checkpoint that the cluster serves as `family`.
    """
    cases = mixed_cases(12, seed=11) if family in PICTURES else encoded_cases(family, _SOURCES[family])
    answers = await family_answers(cluster, family, cases, tokens)
    # One answer of random weights may repeat itself; together they vary.
    distinct = MIN_DISTINCT if family in PICTURES else 1
    assert_exact(family_references(family, path, cases, tokens), answers, min_distinct=distinct)
    assert len({token for answer in answers for token in answer}) >= 20


def encoded_cases(family: str, sources: Sequence[Any]) -> list[EncDecCase]:
    """Requests of an encoder-decoder family on these texts, pictures or sounds."""
    prompt = tuple(checkpoint_of(family, "cpu").decoder.prompt_defaults({}).token_ids)
    return [EncDecCase(source, prompt) for source in sources]


async def family_answers(
    cluster: Cluster, family: str, cases: Sequence[FamilyCase], tokens: int
) -> list[list[int]]:
    """Each case's `tokens` greedy token ids; all are asked at once."""
    answers = await asyncio.gather(
        *(
            ask(cluster.url, case, tokens, model=family)
            if isinstance(case, Case)
            else encdec.ask(cluster.url, case, tokens, model=family)
            for case in cases
        )
    )
    return [answer.token_ids for answer in answers]


def family_references(
    family: str, path: Path, cases: Sequence[FamilyCase], tokens: int
) -> list[OracleResult]:
    """What generate answers to each case."""
    if family in PICTURES:
        return expected(path, [case for case in cases if isinstance(case, Case)], tokens)
    return encdec.expected(path, [case for case in cases if isinstance(case, EncDecCase)], tokens)
