"""The pacer that a PD worker gives its engine: whose threads follow rows and waits for cores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.base.config import PDConfig
from triptych.base.cpu.step_pacer import FollowsRows
from triptych.pd_worker import service

NARROW, WIDE = 256, 4096


@pytest.mark.parametrize(
    ("flags", "width", "follows"),
    [
        ({}, NARROW, True),
        ({"threads": 8}, WIDE, True),
        ({"threads": 1}, WIDE, False),
        # Ranks are processes with threads of their own, and a GPU's steps wait for the GPU.
        ({"threads": 8, "tensor_parallel": 2}, WIDE, False),
        ({"threads": 8, "device": "cuda"}, WIDE, False),
    ],
)
def test_without_a_core_page_threads_of_one_process_on_a_cpu_follow_its_steps(
    flags: dict[str, Any], width: int, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "threads_of_one_worker", lambda: 8)
    model: Any = SimpleNamespace(decoder=SimpleNamespace(geometry=SimpleNamespace(hidden_size=width)))
    pacer = service._step_pacer(PDConfig(**flags), model)
    assert isinstance(pacer, FollowsRows) == follows
