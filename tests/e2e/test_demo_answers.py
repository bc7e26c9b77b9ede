"""The demo answers the quick start's questions, and fills objects for other people's libraries at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import triptych
from examples.demo_models.images.evaluate import cases, evaluate
from examples.demo_models.images.inference import Http, InProcess
from support.processes.cluster import PATIENCE, Cluster, running_cluster
from triptych.demo import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_CALLS = Path(__file__).parents[1] / "support" / "structured_calls.py"
#: By `make structured-clients`; langchain-openai stands beside the product.
_TOOLS = Path(__file__).parents[2] / ".tools"
#: Ways of asking, by library.
WAYS = {
    "langchain-openai": {"json_schema", "function_calling"},
    "pydantic-ai": {"ToolOutput", "NativeOutput"},
    "instructor": {"TOOLS", "JSON_SCHEMA"},
    "openai-agents": {"OpenAIChatCompletionsModel", "OpenAIResponsesModel"},
    "anthropic": {"any", "tool"},
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(None, tmp_path_factory.mktemp("run")) as started:
        yield started


@pytest.mark.parametrize("library", WAYS)
def test_a_library_gets_a_true_object_however_it_asks(demo: Cluster, library: str) -> None:
    own = _TOOLS / library / "venv" / "bin" / "python"
    python = sys.executable if library == "langchain-openai" else str(own)
    asked = subprocess.run(
        [python, str(_CALLS), library, demo.url, str(examples.EXAMPLE_IMAGE)],
        text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr[-2000:]
    said: dict[str, Any] = json.loads(asked.stdout)
    assert said.keys() == WAYS[library]
    assert all(seen["count"] == 2 for seen in said.values()), said


def test_with_embeddings_in_8_bits_the_held_out_questions_have_the_same_answers(tmp_path: Path) -> None:
    asked = cases(1, 180)
    expected = [mark.said for mark in evaluate(InProcess(), asked, controls=False)]
    with running_cluster(None, tmp_path, "--ec-store-rows", "int8") as cluster:
        said = [mark.said for mark in evaluate(Http(cluster.url), asked, controls=False)]
        assert "stored in 8 bits" in cluster.log.read_text()
    assert said == expected


def test_the_answers_of_the_quick_start_are_the_demos(demo: Cluster) -> None:
    page = (Path(__file__).parents[2] / "docs" / "quick-start.md").read_text(encoding="utf-8")
    rows = [row.strip("| ").split(" | ") for row in page.splitlines() if ".png` |" in row]
    assert len(rows) == 5
    with triptych.Client(demo.url, timeout=PATIENCE) as client:
        for files, question, answer in rows:
            pictures = [examples.EXAMPLE_IMAGE.parent / name.strip("`, ") for name in files.split(", ")]
            assert client.ask(question, files=pictures, temperature=0) == answer, (files, question)
