"""What a long prompt costs the event loop of a PD worker, which all requests share."""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from types import FrameType
from typing import Any

import pytest

from triptych.protos import common_pb2, pd_pb2

#: Folders whose code is counted: asyncio's own turns depend on the machine.
OURS = ("/pd_worker/", "/triptych/base/", "/protos/")


async def operations_here(work: Awaitable[object]) -> int:
    """Bytecode instructions of our code that this thread executes until the work has ended."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not any(folder in frame.f_code.co_filename for folder in OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await work
    finally:
        sys.settrace(before)
    return count


def message_of(client: Any, name: str, kind: str, size: int) -> pd_pb2.SubmitRequest:
    """A request that is refused for its length once its prompt is prepared."""
    message = client.message(name, "word " * size if kind == "chat" else "", max_tokens=4)
    if kind == "text":
        message.messages = b""
        message.prompt.CopyFrom(pd_pb2.RawPrompt(text="word " * size))
    elif kind == "tokens":
        message.messages = b""
        message.prompt.CopyFrom(pd_pb2.RawPrompt(token_ids=common_pb2.TokenIds(ids=[5] * size)))
    return message


@pytest.mark.parametrize("kind", ["chat", "text", "tokens"])
async def test_twice_the_prompt_costs_the_workers_event_loop_no_more(worker, client, kind):
    counts = []
    for turn, size in enumerate((1000, 1000, 2000)):
        message = message_of(client, f"r{turn}", kind, size)
        counts.append(await operations_here(worker.servicer.Submit(message, None)))
    _, short, long = counts
    assert long <= 1.1 * short
