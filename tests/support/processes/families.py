"""A cluster of several model families, and requests of each compared with transformers' generate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from support.data.checkpoints import build_checkpoint
from support.data.oracle import MIN_DISTINCT, OracleResult, assert_exact
from support.data.pictures import picture
from support.data.traffic import Case, ask, expected, mixed_cases
from support.encdec import traffic as encdec
from support.encdec.batches import checkpoint_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster, start_cluster, wait_for

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


class FamilyCluster:
    """One store and one proxy; each family has an encoder and a PD worker once it is asked for.

    `shapes`: words of the families' PD workers.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[str, ...]]) -> None:
        self._folder = folder
        self._shapes = shapes
        self._checkpoints: dict[str, Path] = {}

    def start(self, first: str, *words: str) -> Self:
        """Starts the cluster of the family, the proxy with these words."""
        path = self._checkpoints[first] = build_checkpoint(first, self._folder / first)
        words = ("--threads", "1", *words, *self._shapes.get(first, ()))
        self.cluster: Cluster = start_cluster(path, self._folder / "run", *words)
        return self

    def checkpoint(self, family: str) -> Path:
        """The checkpoint that is served as `family`."""
        if family not in self._checkpoints:
            path = self._checkpoints[family] = build_checkpoint(family, self._folder / family)
            words = (str(path), "--threads", "1")
            self.cluster.add_worker("encoder", *words, "--prepared-memory", "64MiB")
            memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
            self.cluster.add_worker("pd", *words, *memory, *self._shapes.get(family, ()))
            wait_for(f"{family} to be served", self._all_served)
        return self._checkpoints[family]

    def _all_served(self) -> bool:
        time.sleep(0.5)  # a look at the registry is dear, and the workers need the cores
        names = self.cluster.models().keys()
        encoders = [worker for worker in self.cluster.workers() if worker.pool == "encoder"]
        return names == self._checkpoints.keys() and len(encoders) == len(names)
