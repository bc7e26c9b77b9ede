"""Preempted requests of real PD processes with too little KV memory: swapped out, back in, and right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SWAP = ("--threads", "1", "--preemption", "swap", "--swap-memory", "64MiB")
TOKENS = 64


def assert_swapped(cluster: Cluster) -> None:
    assert cluster.total("pd", "vllm:num_preemptions_total") > 0
    assert cluster.total("pd", "triptych_pd_swapped_blocks_total") > 0
    assert_at_rest(cluster)
    assert cluster.total("pd", "triptych_pd_host_blocks_used") == 0


async def test_sounds_answer_alike_where_requests_are_swapped_with_their_tables(tmp_path: Path) -> None:
    path = build_checkpoint("whisper", tmp_path / "whisper")
    words = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>"
    prompt = tuple(tokenizer_of(path).convert_tokens_to_ids(words.split()))
    cases = [EncDecCase((1.0 + seed, seed), prompt) for seed in range(8)]
    # So long that any two that meet want more than there is, however slowly their sounds come.
    tokens = 2 * TOKENS - 8
    reference = encdec_traffic.expected(path, cases, tokens)
    # A block of 16 rows is 24 KiB: 4 tables of 94 blocks, and 12 more for requests that will want 8 each.
    memory = ("--kv-memory", "9312KiB", "--max-model-len", "128")
    with running_cluster(path, tmp_path / "run", *SWAP, *memory) as cluster:
        got = await asyncio.gather(*(encdec_traffic.ask(cluster.url, case, tokens) for case in cases))
        assert_exact(reference, [answer.token_ids for answer in got], min_distinct=10)
        await asyncio.to_thread(assert_swapped, cluster)
