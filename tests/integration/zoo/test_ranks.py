"""Two ranks of any class's decoder: the hidden states of one, the tokens of `generate`, and refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest import mock

import pytest
import torch

from support.parallel.batches import RankBatch, compute, open_decoder
from support.parallel.ranks import Job, ThreadRank, run_ranks
from support.pd_ranks.rank_pair import rank_pair, save
from support.zoo.cases import Case
from support.zoo.checkpoint import checkpoint
from support.zoo.engine import Served
from support.zoo.status import SERVED
from triptych.base.errors import ConfigError

pytestmark = pytest.mark.timeout(300)

_STATES = "its layers keep states, or keys and values of different shapes"
_PLAN = "no tensor-parallel plan|plan does not divide its attention"
_STYLE = "which is unknown here"
#: Why a class is served by one rank only.
REFUSED = {
    "Blip2": _PLAN,
    "FuyuForCausalLM": _PLAN,
    "HunYuanVL": _PLAN,
    "InternVL-sinks": _PLAN,
    "Gemma4": _STATES,
    "Gemma4Unified": _STATES,
    "Kimi_K25": _STATES,
    "Lfm2Vl": _STATES,
    "Lfm3Vl": _STATES,
    "MiniCPMOcr": _STATES,
    "MiniCPMV4_6": _STATES,
    "MiniCPMV4_7": _STATES,
    "NemotronH_Omni_Reasoning_V3": _STATES,
    "Qwen3_5": _STATES,
    "Qwen3_5Moe": _STATES,
    "Glm4v": _STYLE,
    "Glm46V": _STYLE,
    "GlmOcr": _STYLE,
    "MiniMaxM3Sparse": _STYLE,
    "MuseSpark": _STYLE,
    "Step3p7": _STYLE,
}


def reason_of(name: str) -> str | None:
    """Of the recipe, else of its class."""
    family, _, variation = name.replace("ForConditionalGeneration", "").partition("-")
    return REFUSED.get(f"{family}-{variation}", REFUSED.get(family))


DIVIDED = [name for name in SERVED if reason_of(name) is None]
WHOLE = [name for name in SERVED if reason_of(name) is not None]
#: Of experts in both layouts, behind a picture's own experts, and of none.
FEW = ("Qwen3VLMoe", "Aria", "Ernie4_5_VLMoe", "InternVL", "Qwen3VL")
_SLOW = pytest.mark.slow


def job_of(name: str) -> Job:
    """Two prompts of text, rows over three tokens of the first."""
    geometry = open_decoder(checkpoint(name), "float32", "none").geometry
    generator = torch.Generator().manual_seed(1)
    positions = torch.cat([torch.arange(8), torch.arange(6)]).expand(geometry.position_rows, -1)
    rows = torch.randn(3, geometry.hidden_size * (1 + geometry.deepstack_levels), generator=generator)
    ids = torch.randint(10, 250, (14,), generator=generator)
    return Job(
        checkpoint(name), RankBatch([8, 6], ids, positions.contiguous(), [rows], torch.tensor([2, 3, 4]))
    )


def check_equals_one_rank(name: str, quantization: str = "none") -> None:
    job = replace(job_of(name), quantization=quantization)
    alone = compute(open_decoder(job.path, job.dtype, job.quantization), job.batch)
    ranks = run_ranks(2, job)
    assert torch.equal(ranks[0]["hidden"], ranks[1]["hidden"])
    for what in ("hidden", "logits"):
        torch.testing.assert_close(ranks[0][what], alone[what], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FEW)
def test_two_ranks_compute_what_one_does(family: str) -> None:
    check_equals_one_rank(f"{family}ForConditionalGeneration")


def test_two_ranks_hold_in_8_bits_what_one_does() -> None:
    check_equals_one_rank("InternVLForConditionalGeneration", "int8")


@_SLOW
@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_of_every_class_with_a_plan_compute_what_one_does(name: str) -> None:
    check_equals_one_rank(name)


@pytest.mark.parametrize("name", [*WHOLE[:1], *(pytest.param(name, marks=_SLOW) for name in WHOLE[1:])])
def test_a_class_that_ranks_cannot_share_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)({reason_of(name)}).*give --tensor-parallel 1"):
        open_decoder(checkpoint(name), "float32", "none", ThreadRank(0, 2))


def test_experts_that_are_not_summed_are_noticed() -> None:
    with mock.patch.object(torch.nn.Module, "register_forward_hook"), pytest.raises(AssertionError):
        check_equals_one_rank("Qwen3VLMoeForConditionalGeneration")


@_SLOW
@pytest.mark.parametrize("family", ["Glm4vMoe", "Llama4", "Ernie4_5_VLMoe"])
async def test_two_processes_answer_as_generate_does(family, store_url, store):
    case = Case.open(f"{family}ForConditionalGeneration", 16)
    recipe, path, encoder = case.served.recipe, case.served.path, case.served.encoder
    async with rank_pair(path, store_url, lambda share: Served(recipe, path, encoder, share)) as (cell, _):
        requests = [cell.checkpoint.request(cell, prompt, case.count) for prompt in case.prompts]
        for request in requests:
            request.ready = frozenset(feature.mm_hash for feature in request.features)
        await save(store, cell.store.values())
        case.assert_exact(await asyncio.to_thread(cell.finish, requests))
