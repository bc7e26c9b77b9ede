"""Faults in every process end as the table says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from support.chaos import faults, stages
from support.chaos.rest import assert_at_rest
from support.chaos.stages import hold
from support.chaos.streams import Streams
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, Case, ask_all
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.faults import FAULTS, Fault
from support.processes.cluster import PATIENCE, Cluster, running_cluster, wait_for
from support.ranks.groups import alive, children
from triptych.apps.launch.embedded_store import EmbeddedStore

pytestmark = pytest.mark.timeout(300)

KILLS = {
    ("encoder", "queued"): stages.kill_queued,
    ("encoder", "encoding"): stages.kill_encoding,
    ("pd", "saved"): stages.kill_saved,
    ("pd", "prefill"): stages.kill_prefill,
    ("pd", "stream"): stages.kill_midstream,
}
HERE = [fault for fault in FAULTS if fault.act == "dies" and (fault.pool, fault.stage) in KILLS]
#: On the cluster that others share, in every run of the tests.
QUICK = [fault for fault in HERE if fault.workers == 1 and fault.stage in ("encoding", "stream")]
#: Seconds that the store is away.
AWAY = {"hangs and is killed": 0.0, "is gone for five seconds": 5.0}
#: An item sleeps so long in the tower: most are still to be stored when the store goes.
TOWER_SECONDS = 0.1
#: Requests wait for the store however long it is away.
PATIENT = ("--encoder-batch-patches", "1", "--store-wait", "120")


def _encoded(cluster: Cluster) -> float:
    return cluster.total("encoder", "triptych_encoder_tower_items_total")


async def _whole(cluster: Cluster, got: list[Any], expected: list[Any]) -> None:
    assert_exact(expected, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    await asyncio.to_thread(assert_at_rest, cluster)


async def _killed(
    fault: Fault, cluster: Cluster, ask: Callable[[list[str]], Streams], crowds: int
) -> list[Any]:
    """`crowds`: how often all cases are asked; streams of the first may end before five are in the middle."""

    def crowd(number: int) -> Streams:
        return ask([f"{fault} {number} {each}" for each in range(crowds)])

    kill = partial(KILLS[fault.pool, fault.stage], cluster)
    return await stages.broken(crowd, partial(stages.closed_gate, cluster), kill)


@pytest.mark.parametrize("fault", QUICK, ids=str)
async def test_a_worker_that_dies_loses_nothing(fault, shared_cluster, cases, reference):
    crowds = 2 if fault.stage == "stream" else 1
    ask = partial(Streams, shared_cluster.url, cases, STREAM_TOKENS)
    await _whole(shared_cluster, await _killed(fault, shared_cluster, ask, crowds), reference * crowds)


@pytest.mark.slow
@pytest.mark.parametrize("fault", HERE, ids=str)
async def test_a_worker_that_dies_at_any_stage_loses_nothing(
    fault, make_cluster, slow_steps, cases, reference
):
    # Two workers are through a crowd twice as soon as one, and a busy machine sees the stage late.
    cluster, crowds = make_cluster(fault.workers, *slow_steps), fault.workers + 1
    ask = partial(Streams, cluster.url, cases, STREAM_TOKENS)
    await _whole(cluster, await _killed(fault, cluster, ask, crowds), reference * crowds)


async def test_a_flushed_store_changes_no_answer(shared_cluster, cases, reference):
    cluster, before = shared_cluster, 0.0

    @contextlib.contextmanager
    def gate():
        nonlocal before
        before = _encoded(cluster)
        with stages.closed_gate(cluster):
            yield

    async def flush(streams):
        await stages.gathered(cluster, streams, streams.pictured)
        async with stages.caught(cluster, streams, "an embedding", lambda: _encoded(cluster) > before + 1):
            stages.assert_unfinished(cluster)
            _flush(cluster)

    def crowd(number):
        return Streams(cluster.url, cases, STREAM_TOKENS, [f"flush {number}"])

    await _whole(cluster, await stages.broken(crowd, gate, flush), reference)


def _flush(cluster: Cluster) -> None:
    with redis.Redis.from_url(cluster.store_url, socket_timeout=PATIENCE) as client:
        client.flushall()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.act in AWAY], ids=str)
async def test_a_store_that_is_away_loses_nothing_and_stops_no_text(fault, start, cases, reference, tmp_path):
    seconds = AWAY[fault.act]
    store = EmbeddedStore(tmp_path / "store", 128 << 20)
    store.start()
    words = ("--store", store.url, *PATIENT)
    cluster = start(*_pools(1, words), environment=faults.sleeping(tower=TOWER_SECONDS))
    texts = [index for index, case in enumerate(cases) if not case.images]
    try:
        async with Streams(cluster.url, cases, STREAM_TOKENS, [""]) as streams:
            await stages.hold("an embedding", lambda: _encoded(cluster) > 1, streams)
            if not seconds:
                os.kill(store.pid, signal.SIGSTOP)
                alone = await ask_all(cluster.url, [cases[index] for index in texts], STREAM_TOKENS)
                assert_exact([reference[index] for index in texts], [answer.token_ids for answer in alone])
            os.kill(store.pid, signal.SIGKILL)
            store.stop()
            await asyncio.sleep(seconds)
            assert stages.unfinished(cluster), "nobody waits for the store"
            store.start()
            got = await streams.all()
        await _whole(cluster, got, reference)
        cluster.stop()
    finally:
        store.stop()


# Encoder-decoder models: every sound is written down and translated, two decoder prompts on one output.

SOUNDS, SOUND_TOKENS = 20, 80
TASKS = (
    "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>",
    "<|startoftranscript|> <|de|> <|translate|> <|notimestamps|>",
)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("whisper", tmp_path_factory.mktemp("chaos") / "whisper")


@pytest.fixture(scope="module")
def sounds(whisper: Path) -> tuple[list[Any], list[Any]]:
    """The cases and what is expected of them."""
    prompts = [tuple(tokenizer_of(whisper).convert_tokens_to_ids(words.split())) for words in TASKS]
    cases = [
        encdec_traffic.EncDecCase((1.0 + seed / 2, seed), prompt)
        for seed in range(SOUNDS)
        for prompt in prompts
    ]
    return cases, encdec_traffic.expected(whisper, cases, SOUND_TOKENS)


@contextlib.contextmanager
def _of_sounds(path: Path, folder: Path, workers: int) -> Iterator[Cluster]:
    pools = ("--encoders", str(workers), "--pd-workers", str(workers), "--threads", "1")
    with running_cluster(
        path, folder, *pools, "--encoder-batch-patches", "1", "--max-queue", "100"
    ) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in HERE if fault.stage != "prefill"], ids=str)
async def test_a_worker_that_dies_loses_no_token_of_a_transcript(fault, whisper, sounds, tmp_path):
    cases, expected = sounds
    with _of_sounds(whisper, tmp_path / "run", fault.workers) as cluster:
        ask = partial(Streams, cluster.url, cases, SOUND_TOKENS, asker=encdec_traffic.ask)
        await _whole(cluster, await _killed(fault, cluster, ask, 1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["flushed", "flushed, and the PD worker dies"])
async def test_sounds_are_encoded_again_where_tables_and_outputs_are_lost(dies, whisper, sounds, tmp_path):
    cases, expected = sounds
    with _of_sounds(whisper, tmp_path / "run", 1) as cluster:
        ask = partial(Streams, cluster.url, cases, SOUND_TOKENS, [""], encdec_traffic.ask)
        with stages.closed_gate(cluster):
            async with ask() as streams:
                await stages.gathered(cluster, streams, streams.pictured)
                stages.open_gate(cluster)
                stage = (lambda: streams.in_the_middle > 5) if dies else (lambda: _encoded(cluster) > 1)
                await stages.hold("the stage", stage, streams)
                with stages.stopped(cluster, "pd"):
                    stages.assert_unfinished(cluster)
                    before = _encoded(cluster)
                    _flush(cluster)
                    if dies:
                        cluster.kill("pd-0")
                got = await streams.all()
        await _whole(cluster, got, expected)
        assert not dies or _encoded(cluster) > before, "neither tables nor stored outputs were left"


#: Batches before an encoder is struck, and steps before a PD worker is: with 20 requests of 100 tokens it has
#: far more than a hundred to do, and is in the middle of streams by then.
AFTER = {"encoder": 3, "pd": 100}
#: How the supervisor tells a process's end: by the watchdog, and by faulthandler's timer.
ENDS = {"holds_the_interpreter": "exit code 1;"}
#: Batches of several pictures, so that both ranks of a tower have a share.
RANKS = ("--encoder-data-parallel", "2", "--max-num-batched-tokens", "64")


async def _harm(
    cluster: Cluster,
    folder: Path,
    order: tuple[str, str, str, int],
    cases: list[Case],
    reference: list[Any],
    ends: str = "exit code 70",
    crowds: int = 1,
) -> None:
    """Strikes an engine as `order` says in the middle of its work, and looks at all answers."""
    harmed, pool, fault, _ = order
    service = harmed.partition("-rank")[0]
    before, resumes = cluster.pid(service), cluster.total("proxy", "triptych_resumes_total")
    faults.order(folder, *order)
    salts = [f"{fault} {number}" for number in range(crowds)]
    async with Streams(cluster.url, cases, STREAM_TOKENS, salts) as streams:
        got = await streams.all()
    assert_exact([*reference] * crowds, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    assert faults.struck(cluster, harmed, pool, fault)
    if pool == "pd":
        assert cluster.total("proxy", "triptych_resumes_total") > resumes
    # The others may be through with everything before the process ends.
    await hold("the end of the process", lambda: f"{service} ended with {ends}" in _log(cluster))
    names = service.split("-")[0]
    await hold("the process to start anew", lambda: cluster.pids(names).get(service, before) != before)
    await asyncio.to_thread(assert_at_rest, cluster)


def _log(cluster: Cluster) -> str:
    return cluster.log.read_text(errors="replace")


def _pools(workers: int, words: tuple[str, ...]) -> tuple[str, ...]:
    return ("--encoders", str(workers), "--pd-workers", str(workers), *words)


async def test_an_only_worker_whose_engine_dies_starts_anew_and_every_request_is_answered(
    shared_cluster, cases, reference
):
    order = ("pd-0", "pd", "dies", AFTER["pd"])
    await _harm(shared_cluster, shared_cluster.run_dir / "faults", order, cases, reference)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("pool", ["pd", "encoder"])
@pytest.mark.parametrize("fault", faults.FAULTS)
async def test_whatever_becomes_of_an_engine_every_request_is_answered(
    start, slow_steps, tmp_path, cases, reference, fault, pool, workers
):
    cluster = start(*_pools(workers, slow_steps), environment=faults.environment(tmp_path / "faults"))
    order = (f"{pool}-0", pool, fault, AFTER[pool])
    await _harm(cluster, tmp_path / "faults", order, cases, reference, ENDS.get(fault, "exit code 70"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encoders", [1, 2], ids=["restart", "takeover"])
@pytest.mark.parametrize("fault", faults.RANK_FAULTS)
async def test_whatever_becomes_of_a_rank_in_a_batch_every_request_is_answered(
    start, tmp_path, cases, reference, fault, encoders
):
    pools = ("--encoders", str(encoders), "--pd-workers", "1", *RANKS)
    cluster = start(*pools, environment=faults.environment(tmp_path / "faults"))
    (rank,) = children(cluster.pid("encoder-0"))
    # A crowd for each encoder: neither is through with its part before the fault.
    order = ("encoder-0-rank1", "rank", fault, 1)
    await _harm(cluster, tmp_path / "faults", order, cases, reference, crowds=encoders)
    wait_for("the end of the old ranks", lambda: not alive(rank))
