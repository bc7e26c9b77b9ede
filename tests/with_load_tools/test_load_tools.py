"""Other people's load tools against `triptych serve`: every request is answered, as long as was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.load_tools import TOOLS, Tool, ToolFigures, ToolLoad, ours
from support.processes.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.load_tools, pytest.mark.timeout(600)]
#: Eight requests, two a second: slow enough for a busy machine.
LOAD = {"requests": 8, "output_tokens": 12}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(None, tmp_path_factory.mktemp("run")) as started:
        yield started


@pytest.fixture(params=[*TOOLS.values(), ours], ids=[*TOOLS, "triptych"])
def tool(request: pytest.FixtureRequest) -> Tool:
    return request.param  # type: ignore[no-any-return]


def test_a_tool_streams_chats_about_texts(cluster, tool, tmp_path):
    assert_all_answered(tool(cluster.url, ToolLoad(**LOAD), tmp_path))


def test_a_tool_streams_chats_about_its_own_pictures(cluster, tool, tmp_path):
    assert_all_answered(tool(cluster.url, ToolLoad(**LOAD, images=2), tmp_path))


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_tool_streams_completions(cluster, tool, tmp_path):
    assert_all_answered(tool(cluster.url, ToolLoad(**LOAD, api="completions"), tmp_path))


def assert_all_answered(found: ToolFigures) -> None:
    assert (found.completed, found.failed, found.tokens) == (LOAD["requests"], 0, LOAD["output_tokens"])
    assert found.ttft > 0 and found.tpot > 0
