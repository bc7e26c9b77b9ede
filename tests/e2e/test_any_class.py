"""Classes without a family of their own through real processes: what is lost changes no answer.

Plain ones, with M-RoPE, with spans, hybrids, and one from a package.

LFM2-VL's processor is on torchvision only: where that is missing, LFM3-VL stands for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from transformers.utils import is_torchvision_available

from support.data.traffic import Answer, Case, ask
from support.processes.cluster import PATIENCE, Cluster, running_cluster
from support.waiting import within
from support.zoo.cases import assert_exact
from support.zoo.checkpoint import checkpoint
from support.zoo.own_processor import TEXT, pictures, reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # By transformers, of its PIL processors.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "model_package"
FAMILIES = ("Ovis2", "Qwen3_5", "Lfm2Vl" if is_torchvision_available() else "Lfm3Vl")
FAMILIES += ("Glm4v", "AyaVision", "Gemma3")
TOKENS = 24
LONG = 400


@pytest.fixture(scope="module", params=[f"{family}ForConditionalGeneration" for family in FAMILIES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(name: str) -> Iterator[Cluster]:
    """One encoder worker and one PD worker, which takes prompts in chunks and loads from the store alone."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        environment = _with_package(Path(folder)) if name.startswith("Ovis2") else {}
        flags = ("--threads", "1", "--max-num-batched-tokens", "32", "--block-size", "8")
        flags += ("--served-model-name", name, "--ec-transfer", "store", "--state-memory", "16MiB")
        run = running_cluster(checkpoint(name), Path(folder) / "run", *flags, environment=environment)
        with run as running:
            yield running


def _with_package(folder: Path) -> dict[str, str]:
    """The environment in which processes see the example, built and installed without a network."""
    shutil.copytree(EXAMPLE, folder / "source")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", folder / "target", folder / "source"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return {
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), f"{folder}/target"])
    }


def case_of(count: int) -> Case:
    return Case((*range(count), TEXT), tuple(pictures(count)))


async def asked(cluster: Cluster, name: str, counts: Sequence[int], tokens: int = TOKENS) -> list[Answer]:
    """Answers to concurrent chats; `counts` are their numbers of pictures."""
    return list(await asyncio.gather(*(ask(cluster.url, case_of(count), tokens, name) for count in counts)))


async def begun(answers: Sequence[Answer]) -> None:
    """Every stream has a token, and none has ended."""
    while not all(answer.token_ids for answer in answers):
        await asyncio.sleep(0.005)
    assert not any(answer.finish_reason for answer in answers), "they end before the fault"


async def test_a_batch_in_chunks_and_from_the_prefix_cache(cluster: Cluster, name: str) -> None:
    expected = {count: reference(name, pictures(count), TOKENS) for count in (1, 2)}
    counts = (1, 2, 1, 2)
    for _ in range(2):
        answers = await asked(cluster, name, counts)
        for count, answer in zip(counts, answers, strict=True):
            prompt, tokens = expected[count]
            assert answer.prompt_token_ids == prompt
            assert_exact(tokens, answer.token_ids, f"{count} pictures")
    assert cluster.total("pd", "triptych_pd_chunked_prefills_total") > 0
    assert sum(answer.usage.prompt_tokens_details.cached_tokens for answer in answers) > 0


async def test_settings_of_the_processor_make_another_item(cluster: Cluster, name: str) -> None:
    if name.startswith("Qwen3_5"):
        options = {"max_pixels": 512}
    elif name.startswith("Ovis2"):
        options = {"do_normalize": False}
    else:
        options = {"do_rescale": False}
    for given in (options, {}, options):
        _, expected = reference(name, pictures(1), TOKENS, given)
        answer = await ask(cluster.url, case_of(1), TOKENS, name, mm_processor_kwargs=given)
        assert_exact(expected, answer.token_ids, str(given))
    wrong = {"model": name, "messages": case_of(1).client_messages(), "mm_processor_kwargs": {"colour": 1}}
    reply = cluster.post(wrong)
    assert (reply["status"], reply["error"]["param"]) == (400, "mm_processor_kwargs.colour")


@pytest.mark.parametrize("evicted", [False, True], ids=["killed", "its embeddings evicted, too"])
async def test_streams_go_on_exactly_when_their_worker_is_killed(cluster, name, evicted):
    _, expected = reference(name, pictures(2), LONG)
    before, resumes = (cluster.total("proxy", f"triptych_{what}_total") for what in ("re_encodes", "resumes"))
    answers = [Answer() for _ in range(2)]
    streams = [
        asyncio.create_task(ask(cluster.url, case_of(2), LONG, name, into=answer)) for answer in answers
    ]
    await within("streams to begin", begun(answers))
    if evicted:
        cluster.kill("pd-0", signal.SIGSTOP)
        with redis.Redis.from_url(cluster.store_url, socket_timeout=PATIENCE) as client:
            client.flushall()
    cluster.kill("pd-0")
    await asyncio.gather(*streams)
    for answer in answers:
        assert_exact(expected, answer.token_ids, "after the kill")
    assert cluster.total("proxy", "triptych_resumes_total") == resumes + 2, "the kill broke no stream"
    again = cluster.total("proxy", "triptych_re_encodes_total") - before
    assert again == (4 if evicted else 0), f"{again} items were asked for again"
