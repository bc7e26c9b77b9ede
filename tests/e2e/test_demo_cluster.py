"""The demo: one trace through all its processes, its answers by every door, its end; and other demos."""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from support.processes.cluster import PATIENCE, Cluster, free_port, running_cluster, wait_for
from support.processes.processes import lives
from support.tracing.collector import Collector, running_collector
from support.tracing.requests import (
    SECRET,
    WHOLE,
    ask,
    has,
    named,
    parent_of_a_trace,
    parents,
    picture_url,
    services,
    spans_of,
    traced,
)
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.demo import examples

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Cluster]:
    """The demo, whose spans go to the collector. The last test ends it."""
    with traced(tmp_path_factory.mktemp("demo"), collector) as cluster:
        yield cluster


def test_one_trace_leads_from_the_client_through_all_processes(demo: Cluster, collector: Collector) -> None:
    trace_id, headers = parent_of_a_trace()
    ask(demo, picture_url((200, 30, 30)), headers)
    spans = spans_of(collector, trace_id, has(*WHOLE))
    assert parents(spans) == WHOLE
    server = named(spans, "chat demo")
    assert server.parent_id == headers["traceparent"].split("-")[2]
    assert {span.state for span in spans} == {"rojo=1"}
    assert not any(span.failed for span in spans)
    made_by = services(spans)
    assert made_by["encode item"] == made_by["PD attempt"] == "proxy"
    assert (made_by["tower"], made_by["decode"]) == ("encoder", "pd")
    for span in spans:
        assert server.start - 0.05 <= span.start <= span.end <= server.end + 0.05, span
    # The prefill begins once the item is there: read from the encoder's memory, beside its save.
    assert named(spans, "save").start <= named(spans, "load item").end <= named(spans, "decode").start
    assert SECRET not in repr(spans)

    # A second request shares the embedding: linked to the span that computed it, in another trace.
    tower = named(spans, "tower")
    assert named(spans, "load item").links == ((trace_id, tower.span_id),)
    again, headers = parent_of_a_trace()
    ask(demo, picture_url((200, 30, 30)), headers)
    second = spans_of(collector, again, has("chat demo", "load item", "PD request"))
    assert named(second, "load item").links == ((trace_id, tower.span_id),)
    assert not has("tower")(second)


class Seen(BaseModel):
    """What a first program asks for: open strings and numbers, nothing closed."""

    color: str
    count: int


class Weather(BaseModel):
    city: str


def test_structured_output_of_the_openai_package_works_at_the_first_try(demo: Cluster) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0}
    question: Any = [{"role": "user", "content": "How many?"}]
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(messages=question, response_format=Seen, **asked)
        assert isinstance(parsed.choices[0].message.parsed, Seen)
        response = client.responses.parse(input="How many?", text_format=Seen, **asked)
        assert isinstance(response.output_parsed, Seen)
        tools = [openai.pydantic_function_tool(Weather)]
        with client.chat.completions.stream(
            messages=question, tools=tools, tool_choice="required", **asked
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls and isinstance(message.tool_calls[0].function.parsed_arguments, Weather)


def test_the_demo_answers_by_every_door_and_ctrl_c_leaves_nothing(demo: Cluster) -> None:
    pids = [demo.pid(name) for name in ("proxy", "fork-server", "encoder-0", "pd-0", "store")]
    assert str(examples.EXAMPLE_REQUEST) in demo.log.read_text()
    assert "by exec" not in demo.log.read_text()  # both were forked
    assert _loads_of_the_example(demo) == ["by shared memory"]
    asked = subprocess.run(
        [sys.executable, "-m", "triptych.apps.cli", "ask", examples.EXAMPLE_QUESTION]
        + ["--url", demo.url, "--image", str(examples.EXAMPLE_IMAGE)],
        text=True, capture_output=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert asked.stdout.strip() == examples.EXPECTED_ANSWER
    assert _grpc_answer(demo) == examples.EXPECTED_ANSWER
    assert _answers_of_the_examples(demo.url) == [examples.EXPECTED_ANSWER] * 4
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(PATIENCE) == 0
    assert not [pid for pid in pids if lives(pid)]
    left = [path for path in demo.run_dir.iterdir() if path.is_socket() or path.name == "cluster.json"]
    assert not left


def _loads_of_the_example(cluster: Cluster) -> list[str]:
    """By which paths the picture of the request to paste came to the PD worker; its answer is right."""
    reply: dict[str, Any] = cluster.post(json.loads(examples.EXAMPLE_REQUEST.read_text()))
    assert reply["choices"][0]["message"]["content"] == examples.EXPECTED_ANSWER
    record = cluster.get(f"/cluster/requests/{reply['id'].removeprefix('chatcmpl-')}")
    return [span["note"] for span in record["spans"] if span["name"] == "load"]


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


@pytest.mark.slow
def test_a_new_picture_goes_by_the_store_where_that_is_asked_for(tmp_path: Path) -> None:
    with running_cluster(DEMO_MODEL, tmp_path, "--ec-transfer", "store") as cluster:
        assert _loads_of_the_example(cluster) == [""]


@pytest.mark.slow
def test_a_collector_that_is_down_is_not_felt_and_one_that_comes_back_gets_new_spans(tmp_path: Path) -> None:
    port = free_port()
    collector = Collector(url=f"http://127.0.0.1:{port}")
    with traced(tmp_path / "run", collector) as cluster:
        answers = [
            ask(cluster, picture_url((colour, 9, 9)), parent_of_a_trace()[1])["choices"][0]["finish_reason"]
            for colour in range(8)
        ]
        assert set(answers) <= {"stop", "length"}
        with running_collector(port) as back:

            def came() -> bool:
                ask(cluster, picture_url((7, 7, 7)), parent_of_a_trace()[1])
                return {"triptych-proxy", "triptych-encoder", "triptych-pd"} <= {
                    s.service for s in back.spans()
                } or ("triptych-pd" in {s.service for s in back.spans()})

            wait_for("spans at the collector", came)
        log = cluster.log.read_text()
        warned = [line for line in log.splitlines() if "spans of traces are lost" in line]
        assert len(warned) <= 6, warned  # one a minute in each of three processes
        assert "Traceback" not in log
