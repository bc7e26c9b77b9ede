"""Graph backends on a CPU: which one a flag names, and what a replay computes."""

from __future__ import annotations

import pytest
import torch

from triptych.base.config.worker import GRAPH_MODES
from triptych.base.errors import ConfigError
from triptych.base.machine.graphs import EagerStatic, graph_backend

CPU = torch.device("cpu")


def test_off_and_auto_need_no_graphs_on_a_cpu() -> None:
    assert graph_backend("off", CPU, "--decode-graphs") is None
    assert graph_backend("auto", CPU, "--decode-graphs") is None


def test_static_is_a_backend_of_every_device() -> None:
    backend = graph_backend("static", CPU, "--decode-graphs")
    assert isinstance(backend, EagerStatic)
    assert backend.mode in GRAPH_MODES


def test_cuda_graphs_on_a_cpu_are_an_error_that_names_flag_device_and_remedy() -> None:
    with pytest.raises(ConfigError, match="--encoder-graphs cuda needs --device cuda, not cpu: use .* auto"):
        graph_backend("cuda", CPU, "--encoder-graphs")


def test_a_replay_reads_what_the_buffers_hold_now() -> None:
    values, result = torch.zeros(3), torch.zeros(3)
    captured = EagerStatic().capture(lambda: result.copy_(values * 2))
    values.copy_(torch.tensor([1.0, 2.0, 3.0]))
    captured.replay()
    assert result.tolist() == [2.0, 4.0, 6.0]
