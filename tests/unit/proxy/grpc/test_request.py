"""Calls as gRPC clients send them."""

from __future__ import annotations

import pytest

from triptych.protos import proxy_pb2
from triptych.proxy.grpc.request import call_of


@pytest.mark.parametrize(("asked", "given"), [(0.0, 5.0), (2.0, 2.0), (100.0, 5.0)])
def test_a_timeout_above_the_servers_is_the_servers_over_grpc(asked: float, given: float) -> None:
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="hi")])
    request = proxy_pb2.ChatRequest(messages=[message], timeout=asked)
    call, _ = call_of(request, max_images=1, timeout=5.0, max_choices=1)
    assert call.timeout == given
