"""The demo, and what it transfers."""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support.processes.cluster import PATIENCE, Cluster, start_cluster
from support.processes.processes import lives
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.demo import examples

pytestmark = pytest.mark.timeout(300)


def test_the_demo_answers_by_every_door_and_ctrl_c_leaves_nothing(tmp_path):
    cluster = start_cluster(DEMO_MODEL, tmp_path)
    try:
        pids = [cluster.pid(name) for name in ("proxy", "fork-server", "encoder-0", "pd-0", "store")]
        assert str(examples.EXAMPLE_REQUEST) in cluster.log.read_text()
        assert "by exec" not in cluster.log.read_text()  # both were forked
        reply = cluster.post(json.loads(examples.EXAMPLE_REQUEST.read_text()))
        assert reply["choices"][0]["message"]["content"] == examples.EXPECTED_ANSWER
        asked = subprocess.run(
            [sys.executable, "-m", "triptych.apps.cli", "ask", examples.EXAMPLE_QUESTION]
            + ["--url", cluster.url, "--image", str(examples.EXAMPLE_IMAGE)],
            text=True, capture_output=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
        assert asked.stdout.strip() == examples.EXPECTED_ANSWER
        assert _grpc_answer(cluster) == examples.EXPECTED_ANSWER
        assert _answers_of_the_examples(cluster.url) == [examples.EXPECTED_ANSWER] * 4
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(PATIENCE) == 0
        assert not [pid for pid in pids if lives(pid)]
        assert not [path for path in tmp_path.iterdir() if path.is_socket() or path.name == "cluster.json"]
    finally:
        cluster.stop()


def _answers_of_the_examples(url: str) -> list[str]:
    """What the programs in examples/ answer when they are pointed at `url`."""
    folder = Path(__file__).parents[2] / "examples"
    programs = {path.stem: runpy.run_path(str(path)) for path in sorted(folder.glob("[!_]*.py"))}
    picture, question = str(examples.EXAMPLE_IMAGE), examples.EXAMPLE_QUESTION
    several = programs.pop("many_at_once")["main"]
    answers = [program["main"](picture, question, url) for program in programs.values()]
    return [*answers, *asyncio.run(several(question, picture, url=url))]


def _grpc_answer(cluster: Cluster) -> str:
    parts = {"image": examples.EXAMPLE_IMAGE.read_bytes()}, {"text": examples.EXAMPLE_QUESTION}
    return "".join(event.text for event in cluster.chat_grpc(*parts, max_tokens=64))


@pytest.mark.parametrize(
    "transfer, note", [("store", ""), pytest.param("auto", "by shared memory", marks=pytest.mark.slow)]
)
def test_a_new_picture_takes_the_path_that_is_asked_for(tmp_path, transfer, note):
    cluster = start_cluster(DEMO_MODEL, tmp_path, "--ec-transfer", transfer)
    try:
        reply = cluster.post(json.loads(examples.EXAMPLE_REQUEST.read_text()))
        assert reply["choices"][0]["message"]["content"] == examples.EXPECTED_ANSWER
        record = f"{cluster.url}/cluster/requests/{reply['id'].removeprefix('chatcmpl-')}"
        with urllib.request.urlopen(record, timeout=10) as page:
            spans = json.loads(page.read())["spans"]
        assert [span["note"] for span in spans if span["name"] == "load"] == [note]
    finally:
        cluster.stop()
