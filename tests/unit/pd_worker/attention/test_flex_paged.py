"""FlexAttention: how many programs it takes, and what happens where there can be none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import inputs_of
from support.encdec.cell import EncDecCheckpoint
from support.engine.engine_cell import engine_cell
from triptych.errors import ConfigError
from triptych.models.checkpoint.support import wanted_by_flex
from triptych.pd_worker.attention import flex_kernel as flex_kernel
from triptych.pd_worker.attention import flex_start as flex_start
from triptych.pd_worker.attention.flex_start import prepare, slow_while_compiling, warm_up
from triptych.pd_worker.attention.metadata import AttentionMetadata
from triptych.watchdog import SLOW_FACTOR, EngineBeat


class Programs:
    """Stands for a compiler: torch traces and guards as it does for one, and this counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """The kernel is compiled on a CPU too, by nothing but torch's tracing."""
    torch.compiler.reset()
    programs = Programs()
    kernel = torch.compile(flex_kernel._kernel, fullgraph=True, backend=programs)
    monkeypatch.setattr(flex_kernel, "compiled", lambda: kernel)
    monkeypatch.setattr(flex_kernel, "is_compiled", lambda device: True)
    yield programs
    torch.compiler.reset()


@pytest.fixture(scope="module")
def t5() -> EncDecCheckpoint:
    return EncDecCheckpoint.open(build_checkpoint("t5"))


def test_no_batch_after_the_warm_up_is_compiled_again(t5: EncDecCheckpoint, programs: Programs) -> None:
    warm_up(t5.decoder, 8)
    assert programs.count == 4, "decodes and chunks, with a bias and without"
    vocab = t5.decoder.geometry.vocab_size
    flags = {"max_model_len": 512, "block_size": 8, "max_num_batched_tokens": 300}
    with engine_cell(t5, attention_backend="flex", **flags) as cell:
        for count, length in ((1, 1), (3, 40), (2, 290)):
            requests = [
                t5.request(cell, inputs_of("t5", t5.path, number, vocab), [0, *range(5, 4 + length)], 3)
                for number in range(count)
            ]
            cell.finish(requests)
    assert programs.count == 4


def test_beyond_torchs_limit_it_runs_uncompiled(
    t5: EncDecCheckpoint, programs: Programs, caplog: pytest.LogCaptureFixture
) -> None:
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING):
        warm_up(t5.decoder, 16)
    assert programs.count == 1
    assert "runs uncompiled" in caplog.text


@pytest.mark.parametrize(
    ("device", "head_dim", "wanted"), [("cuda", 8, ["flex_heads"]), ("cuda", 16, []), ("cpu", 8, [])]
)
def test_small_heads_are_refused_on_cuda(device: str, head_dim: int, wanted: list[str]) -> None:
    assert wanted_by_flex(device, head_dim) == wanted


def test_what_cannot_be_compiled_is_refused_at_the_start(
    t5: EncDecCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(call: object) -> torch.Tensor:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(flex_start, "is_compiled", lambda device: True)
    monkeypatch.setattr("triptych.pd_worker.attention.flex_paged.attend", no_compiler)
    with pytest.raises(ConfigError, match="cannot be served: give --attention-backend sdpa"):
        prepare(t5.path, t5.decoder, 16)


def test_on_a_cpu_nothing_is_compiled_at_the_start(
    t5: EncDecCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_start, "warm_up", None)
    prepare(Path("model"), t5.decoder, 16)


def test_plans_are_made_once_for_all_layers(t5: EncDecCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AttentionMetadata] = []
    forward = t5.decoder.forward

    def watch(*args: Any) -> torch.Tensor:
        seen.append(args[3])
        return forward(*args)

    monkeypatch.setattr(t5.decoder, "forward", watch)
    warm_up(t5.decoder, 16)
    assert t5.decoder.geometry.num_layers > 1
    assert len(seen[0].plans) == 4, "decodes and a chunk, of the own and of the cross attention"


def test_a_step_that_torch_compiles_something_for_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    for callbacks in ("start_callbacks", "end_callbacks"):
        monkeypatch.setattr(flex_start.callback_handler, callbacks, [])
    beat = EngineBeat("engine")
    slow_while_compiling(beat)
    seen: list[float] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(beat.patience)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=compiler)
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen == [SLOW_FACTOR]
    assert beat.patience == 1.0
    torch.compiler.reset()
