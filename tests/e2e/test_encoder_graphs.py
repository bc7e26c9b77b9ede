"""Every family with encoder graphs, through HTTP, proxy, encoder worker, store and PD worker: as `generate`.

The graphs are static buffers with plain calls: they run on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import ask_all, expected, mixed_cases, picture
from support.encdec import traffic as encdec
from support.encdec.batches import checkpoint_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster, start_cluster, wait_for

pytestmark = pytest.mark.timeout(600)

TOKENS = 48
GRAPHS = ("--encoder-graphs", "static")
PICTURES = ("qwen3_vl", "qwen2_5_vl", "llava")
ENC_DEC = ("bart", "mbart", "t5", "whisper", "trocr")
TEXTS = (
    "The rain in Spain",
    "x",
    "A red circle beside a blue square, and nothing else in the picture",
    "Hi you",
)
MEDIA: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("bart", "mbart", "t5"), TEXTS),
    "trocr": [picture(seed, 70 + 9 * seed, 40) for seed in range(4)],
    "whisper": [(1.0 + seed, seed) for seed in range(4)],
}


@contextmanager
def served(families: Sequence[str], folder: Path) -> Iterator[Cluster]:
    """One store and one proxy, and for each family an encoder with graphs and a PD worker."""
    first, *others = families
    paths = {family: build_checkpoint(family) for family in families}
    name = ("--served-model-name", first, "--threads", "1")
    cluster = start_cluster(paths[first], folder / "run", *name, *GRAPHS)
    try:
        for family in others:
            words = (str(paths[family]), "--served-model-name", family, "--threads", "1")
            cluster.add_worker("encoder", *words, "--prepared-memory", "64MiB", *GRAPHS)
            memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
            cluster.add_worker("pd", *words, *memory)

        def all_served() -> bool:
            time.sleep(0.5)  # a look at the registry is dear, and the workers need the cores
            with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=10) as reply:
                names = {model["id"] for model in json.loads(reply.read())["data"]}
            encoders = [worker for worker in cluster.workers() if worker.pool == "encoder"]
            return names == set(families) and len(encoders) == len(families)

        wait_for("all families to be served", all_served)
        yield cluster
    finally:
        cluster.stop()


async def assert_pictures_exact(cluster: Cluster, family: str) -> None:
    cases = mixed_cases(12, seed=17)
    answers = await ask_all(cluster.url, cases, TOKENS, model=family)
    reference = expected(build_checkpoint(family), cases, TOKENS)
    assert_exact(reference, [answer.token_ids for answer in answers])


async def assert_encoded_exact(cluster: Cluster, family: str) -> None:
    path = build_checkpoint(family)
    prompt = tuple(checkpoint_of(family, "cpu").decoder.prompt_defaults({}).token_ids)
    cases = [EncDecCase(source, prompt) for source in MEDIA[family]]
    answers = await asyncio.gather(*(encdec.ask(cluster.url, case, TOKENS, model=family) for case in cases))
    reference = encdec.expected(path, cases, TOKENS)
    assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=1)
    assert len({token for answer in answers for token in answer.token_ids}) >= 20


def assert_by_graphs(cluster: Cluster) -> None:
    """Everything was encoded by replays."""
    hits = cluster.total("encoder", "triptych_encoder_graph_hits_total")
    assert hits == cluster.total("encoder", "triptych_encoder_tower_items_total") > 0
    assert cluster.total("encoder", "triptych_encoder_graph_misses_total") == 0


@pytest.mark.slow
async def test_models_with_pictures_are_exact_with_graphs(tmp_path: Path) -> None:
    with served(PICTURES, tmp_path) as cluster:
        for family in PICTURES:
            await assert_pictures_exact(cluster, family)
        assert_by_graphs(cluster)


@pytest.mark.slow
async def test_encoder_decoder_models_are_exact_with_graphs(tmp_path: Path) -> None:
    with served(ENC_DEC, tmp_path) as cluster:
        for family in ENC_DEC:
            await assert_encoded_exact(cluster, family)
        assert_by_graphs(cluster)


async def test_a_model_with_pictures_is_exact_with_graphs(tmp_path: Path) -> None:
    with served(("llava",), tmp_path) as cluster:
        await assert_pictures_exact(cluster, "llava")
        assert_by_graphs(cluster)
