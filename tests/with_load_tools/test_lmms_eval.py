"""lmms-eval without a hub: it scores the answers of docs/quick-start.md, on a data set of files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load_tools import program, run_tool
from support.processes.cluster import Cluster, running_cluster
from triptych.apps.launch.model_path import DEMO_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.load_tools, pytest.mark.timeout(600)]

EXAMPLES = DEMO_MODEL.parent / "examples"
#: Pictures, a question and its answer, of docs/quick-start.md; the last answer is wrong.
ROWS = [
    (
        ["two_shapes"],
        "What is in the image?",
        "A red circle at the top left and a blue square at the bottom right.",
    ),
    (["four_shapes"], "How many shapes are there?", "There are four shapes."),
    (
        ["two_shapes", "four_shapes"],
        "Which image has the most shapes?",
        "The second image has the most shapes.",
    ),
    (["two_shapes"], "What is at the top left?", "There is a green triangle at the top left."),
]
TASK = """
task: shapes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function shapes.pictures
doc_to_text: question
doc_to_target: answer
process_results: !function shapes.score
metric_list: [{{metric: right, aggregation: mean, higher_is_better: true}}]
generation_kwargs: {{max_new_tokens: 32, temperature: 0}}
"""
FUNCTIONS = """
from PIL import Image


def pictures(row):
    return [Image.open("EXAMPLES/" + name + ".png").convert("RGB") for name in row["pictures"]]


def score(row, results):
    return {"right": float(results[0] == row["answer"])}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(DEMO_MODEL, tmp_path_factory.mktemp("run")) as started:
        yield started


def test_lmms_eval_scores_the_answers_of_the_demo_model(cluster: Cluster, tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    rows = [dict(zip(("pictures", "question", "answer"), row, strict=True)) for row in ROWS]
    (task / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (task / "shapes.yaml").write_text(TASK.format(rows=task / "rows.jsonl"))
    (task / "shapes.py").write_text(FUNCTIONS.replace("EXAMPLES", str(EXAMPLES)))
    samples, results = evaluate(cluster.url, task, tmp_path)
    answers = {sample["doc_id"]: sample["filtered_resps"] for sample in samples}
    assert results["right,none"] == 0.75, answers
    assert [answers[row] for row in range(3)] == [answer for _, _, answer in ROWS[:3]]


def evaluate(url: str, task: Path, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The samples and the results of the task `shapes`."""
    words = ("--model", "openai", "--model_args", f"model=demo,base_url={url}/v1,api_key=none")
    words += ("--tasks", "shapes", "--include_path", str(task), "--batch_size", "1")
    words += ("--output_path", str(folder / "out"), "--log_samples")
    run_tool(folder, "env", "HF_HUB_OFFLINE=1", program("lmms-eval"), *words)
    [logged] = (folder / "out").rglob("*samples_shapes.jsonl")
    [found] = (folder / "out").rglob("*results.json")
    return (
        [json.loads(line) for line in logged.read_text().splitlines()],
        json.loads(found.read_text())["results"]["shapes"],
    )
