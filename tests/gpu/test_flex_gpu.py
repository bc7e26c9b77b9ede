"""FlexAttention compiled for the device against torch's own kernel, and how often it is compiled."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import inputs_of
from support.encdec.cell import EncDecCheckpoint
from support.engine.cuda_step import HEADS, step
from support.engine.engine_cell import engine_cell
from triptych.models.families.t5 import RelativeBias
from triptych.pd_worker.attention.flex_start import prepare

pytestmark = pytest.mark.gpu


class Distances(RelativeBias):
    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        self.table = torch.randn(HEADS, 50, generator=generator, device="cuda")


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 3.0}])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_step_is_that_of_sdpa(
    kv_heads: int, options: dict[str, object], dtype: torch.dtype, atol: float
) -> None:
    flex, sdpa = (step(backend, dtype, kv_heads, None, **options) for backend in ("flex", "sdpa"))
    torch.testing.assert_close(flex, sdpa, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_bias_by_distance_is_that_of_sdpa(kv_heads: int) -> None:
    flex, sdpa = (step(backend, torch.float32, kv_heads, Distances()) for backend in ("flex", "sdpa"))
    torch.testing.assert_close(flex, sdpa, atol=1e-4, rtol=1e-3)


def test_no_request_waits_for_the_compiler() -> None:
    t5 = EncDecCheckpoint.open(build_checkpoint("t5"), device="cuda")
    counters.clear()
    prepare(t5.path, t5.decoder, 8)
    before = counters["stats"]["unique_graphs"]
    assert before == 4
    vocab = t5.decoder.geometry.vocab_size
    flags = {"max_model_len": 512, "block_size": 8, "max_num_batched_tokens": 300}
    with engine_cell(t5, attention_backend="flex", **flags) as cell:
        for count, length in ((1, 1), (3, 40), (2, 290)):
            prompt = [0, *range(5, 4 + length)]
            inputs = [inputs_of("t5", t5.path, number, vocab) for number in range(count)]
            cell.finish([t5.request(cell, one, prompt, 3) for one in inputs])
    assert counters["stats"]["unique_graphs"] == before
