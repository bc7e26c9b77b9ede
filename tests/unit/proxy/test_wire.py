from __future__ import annotations

import pytest

from triptych.protos import common_pb2
from triptych.protos.convert import error_from_proto


@pytest.mark.parametrize("seconds", [float("inf"), float("-inf"), float("nan"), -1.0, 1e9, 0.0])
def test_a_wait_that_no_worker_can_mean_is_not_passed_on(seconds: float) -> None:
    assert error_from_proto(common_pb2.Error(code="overloaded", retry_after=seconds)).retry_after is None


def test_a_wait_is_passed_on() -> None:
    assert error_from_proto(common_pb2.Error(code="overloaded", retry_after=2.0)).retry_after == 2.0
