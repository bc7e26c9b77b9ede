"""A vision model's cluster and encoder-decoder clusters on one store at once: nobody reads another's rows."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.chaos.rest import assert_at_rest
from support.data import traffic
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import Case, picture
from support.encdec import traffic as encdec_traffic
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster, running_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 40
#: The bytes that both models get: only the namespace tells their keys apart.
PICTURES = [picture(70 + number, 64, 64) for number in range(4)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: build_checkpoint(family, folder / family) for family in ("qwen3_vl", "trocr", "bart")}


@pytest.fixture(scope="module")
def clusters(
    paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Cluster]]:
    """Three clusters, each with a proxy; the first one's store serves all."""
    folder = tmp_path_factory.mktemp("clusters")
    with ExitStack() as stack:
        running: dict[str, Cluster] = {}
        # Proxies meet all workers of the store: they need one token.
        words: tuple[str, ...] = ("--internal-token", "token of all clusters")
        for family, path in paths.items():
            cluster = running_cluster(path, folder / family, "--threads", "1", *words)
            running[family] = stack.enter_context(cluster)
            words = (*words[:2], "--store", running["qwen3_vl"].store_url)
        for cluster in running.values():
            wait_for("every model at every proxy", lambda cluster=cluster: served(cluster) == set(paths))
        yield running


def served(cluster: Cluster) -> set[str]:
    """The models of its proxy."""
    with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=10) as reply:
        return {model["id"] for model in json.loads(reply.read())["data"]}


async def test_the_same_pictures_and_texts_at_once_are_answered_by_each_model_as_by_generate(clusters, paths):
    seen = [Case((0, f"what is picture {number}"), (image,)) for number, image in enumerate(PICTURES)]
    read = [EncDecCase(image, (2,)) for image in PICTURES]
    texts = [EncDecCase(f"what is picture {number}", (2, 0)) for number in range(len(PICTURES))]
    reference = traffic.expected(paths["qwen3_vl"], seen, TOKENS)
    written = encdec_traffic.expected(paths["trocr"], read, TOKENS)
    retold = encdec_traffic.expected(paths["bart"], texts, TOKENS)
    tower = clusters["qwen3_vl"].total("encoder", "triptych_encoder_tower_items_total")
    # Every proxy knows every model of the store: all are asked through each of them.
    asked = [
        asyncio.gather(
            traffic.ask_all(cluster.url, seen, TOKENS, "qwen3_vl"),
            *(encdec_traffic.ask(cluster.url, case, TOKENS, "trocr") for case in read),
            *(encdec_traffic.ask(cluster.url, case, TOKENS, "bart") for case in texts),
        )
        for cluster in clusters.values()
    ]
    for answers, *others in await asyncio.gather(*asked):
        assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=10)
        ids = [answer.token_ids for answer in others]
        assert_exact(written, ids[: len(read)], min_distinct=10)
        assert_exact(retold, ids[len(read) :], min_distinct=10)
    # Pictures at two models and the texts: each once, whatever proxy asked first.
    done = clusters["qwen3_vl"].total("encoder", "triptych_encoder_tower_items_total")
    assert done == tower + 3 * len(PICTURES)
    for cluster in clusters.values():
        await asyncio.to_thread(assert_at_rest, cluster)
