"""Decoder sides divided among processes against the same side in one, and against transformers."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from support.data.checkpoints import FAMILIES as MERGING
from support.data.checkpoints import build_checkpoint
from support.data.model_prompts import model_prompt, question
from support.data.oracle import oracle, teacher_forced_logits
from support.data.pictures import picture
from support.data.sounds import sound
from support.encdec.checkpoints import FAMILIES as CROSSING
from support.encdec.oracle import (
    audio_inputs,
    decoder_logits,
    encoder_rows,
    greedy,
    image_inputs,
    text_inputs,
)
from support.parallel.batches import RankBatch, compute, open_decoder
from support.parallel.ranks import Job, run_ranks, start_ranks
from triptych.models.registry import family_of, load_encoder
from triptych.models.weights.quantization import is_exact

pytestmark = pytest.mark.timeout(600)


CPU = torch.device("cpu")
#: Tokens that transformers says after each prompt.
NEW_TOKENS = 12


@dataclass(frozen=True)
class Said:
    """A batch of two prompts with what was said after them.

    `logits` are transformers' own at the tokens `at` of the batch, all in one.
    """

    batch: RankBatch
    at: torch.Tensor
    logits: torch.Tensor


@functools.cache
def said(family: str, variant: str) -> Said:
    """The same for every run of a checkpoint."""
    path = build_checkpoint(family, variant=variant)
    return _merged(path) if family in MERGING else _crossed(path)


def _merged(path: Path) -> Said:
    """A question about a picture, and one about none."""
    encoder = load_encoder(path, device=CPU, dtype=torch.float32)
    decoder = open_decoder(path, "float32", "none")
    ids: list[int] = []
    lengths: list[int] = []
    positions, rows, index, at, logits = [], [], [], [], []
    for images in ([picture(1, 64, 64)], []):
        result = oracle(path, question(len(images)), images, max_new_tokens=NEW_TOKENS)
        tokens = [*result.prompt_token_ids, *result.token_ids]
        prompt = model_prompt(encoder, decoder, tokens, images)
        start = sum(lengths)
        for feature, part in zip(prompt.features, prompt.rows, strict=True):
            index.append(torch.arange(feature.placement.offset, feature.placement.end) + start)
            rows.append(part)
        ids += tokens
        positions.append(decoder.positions(tokens, prompt.features)[0])
        lengths.append(len(tokens))
        at.append(torch.arange(len(tokens) - NEW_TOKENS - 1, len(tokens)) + start)
        logits.append(teacher_forced_logits(path, question(len(images)), images, result.token_ids))
    batch = RankBatch(lengths, torch.tensor(ids), torch.cat(positions, dim=1), rows, torch.cat(index))
    return Said(batch, torch.cat(at), torch.cat(logits))


def _crossed(path: Path) -> Said:
    """Two inputs of the encoder, of different lengths where it takes such."""
    modality = family_of(path).decoder.modality
    if modality == "audio":
        inputs = [audio_inputs(path, sound(seconds, seed=1)) for seconds in (0.5, 1.5)]
    elif modality == "image":
        inputs = [image_inputs(path, picture(seed)) for seed in (1, 2)]
    else:
        inputs = [text_inputs(path, text) for text in ("A calm sea.", "größer als " * 9)]
    ids: list[int] = []
    lengths: list[int] = []
    rows, logits = [], []
    for each in inputs:
        result = greedy(path, each, max_new_tokens=NEW_TOKENS)
        tokens = [*result.prompt_token_ids, *result.token_ids]
        ids += tokens
        lengths.append(len(tokens))
        rows.append(encoder_rows(path, each))
        logits.append(decoder_logits(path, each, tokens))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = RankBatch(lengths, torch.tensor(ids), positions, rows)
    return Said(batch, torch.arange(len(ids)), torch.cat(logits))


#: Every family, with heads that two and four ranks can share; Qwen and LLaVA have two KV heads.
FAMILIES = (
    ("qwen3_vl", ""),
    ("qwen2_5_vl", "hub+sharded"),
    ("llava", "tied"),
    ("bart", "scaled"),
    ("mbart", ""),
    ("trocr", ""),
    ("whisper", "small"),
    ("t5", "even"),
)
FAULTS = (
    ("no all-reduce", "qwen3_vl", ""),
    ("bias of every rank", "whisper", "small"),
    ("KV heads of rank 0", "qwen2_5_vl", "hub+sharded"),
)


@dataclass(frozen=True)
class Model:
    """How one model of a run is loaded."""

    family: str
    variant: str
    dtype: str = "float32"
    quantization: str = "none"
    fault: str | None = None

    def job(self) -> Job:
        path = build_checkpoint(self.family, variant=self.variant)
        return Job(path, said(self.family, self.variant).batch, self.dtype, self.quantization, self.fault)

    def alone(self) -> dict[str, torch.Tensor]:
        """What one process computes."""
        job = self.job()
        return compute(open_decoder(job.path, job.dtype, job.quantization), job.batch)


EXACT = tuple(Model(family, variant) for family, variant in FAMILIES)
INT8 = (Model("qwen3_vl", "tied", quantization="int8"), Model("t5", "even+tied", quantization="int8"))
FAULTY = tuple(Model(family, variant, fault=fault) for fault, family, variant in FAULTS)
#: A rank rounds its own part of a row: near to one process's, and not equal.
W8A8 = (Model("qwen3_vl", "tied", quantization="w8a8"), Model("t5", "even", quantization="w8a8"))
SERVED = W8A8 if is_exact() else ()


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of collectives over gloo that rank 0 calls alone: the others do not come, or have ended."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(2, folder, "gloo", 200)
    found: dict[str, str] = json.loads((folder / "errors-0.json").read_text())
    return found


def check_equals_one_rank(model: Model, ranks: list[dict[str, torch.Tensor]]) -> None:
    alone = model.alone()
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found["hidden"], alone["hidden"], atol=1e-4, rtol=0)
        assert torch.equal(found["hidden"], ranks[0]["hidden"])
        assert found["logits"].shape == alone["logits"].shape
        assert found["logits"].isnan().all() == (rank > 0)
    torch.testing.assert_close(ranks[0]["logits"], alone["logits"], atol=1e-4, rtol=0)
    if "cross" in alone:
        keys = torch.cat([found["cross"] for found in ranks], dim=1)
        torch.testing.assert_close(keys, alone["cross"], atol=1e-5, rtol=0)


def check_equals_transformers(model: Model, ranks: list[dict[str, torch.Tensor]]) -> None:
    """Teacher-forced over transformers' own greedy output, so that equal best tokens are equal outputs."""
    reference = said(model.family, model.variant)
    logits = ranks[0]["logits"][reference.at]
    torch.testing.assert_close(logits, reference.logits, atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), reference.logits.argmax(-1))


@pytest.mark.parametrize("model", EXACT, ids=lambda model: model.family)
def test_two_ranks_compute_what_one_does_and_say_what_transformers_says(model: Model) -> None:
    ranks = run_ranks(2, model.job())
    check_equals_one_rank(model, ranks)
    check_equals_transformers(model, ranks)


@pytest.mark.parametrize("model", INT8, ids=lambda model: model.family)
def test_weights_in_8_bits_are_those_of_one_rank(model: Model) -> None:
    check_equals_one_rank(model, run_ranks(2, model.job()))


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.family)
def test_two_ranks_are_as_near_to_float32_as_one_with_8_bit_inputs(model: Model) -> None:
    check_as_near_as_one_rank(model, replace(model, quantization="none"), run_ranks(2, model.job()))


#: In half precision, in 8 bits, with heads tied and not.
MATRIX = tuple(
    Model(family, variant if tied == "" else f"{variant}+{tied}".strip("+"), dtype, quantization)
    for family, variant in (
        *(("t5", "even") if family == "t5" else (family, "") for family in (*MERGING, *CROSSING)),
        ("whisper", "small"),
    )
    for tied in ("", "tied")
    for dtype in ("float32", "bfloat16")
    for quantization in ("none", "int8")
)


def check(model: Model, ranks: list[dict[str, torch.Tensor]]) -> None:
    """Equal to one process's; in half precision as near to float32 as twice what one process is."""
    if model.dtype == "float32":
        check_equals_one_rank(model, ranks)
        if model.quantization == "none":
            check_equals_transformers(model, ranks)
        return
    check_as_near_as_one_rank(model, replace(model, dtype="float32"), ranks)


def check_as_near_as_one_rank(model: Model, exact: Model, ranks: list[dict[str, torch.Tensor]]) -> None:
    """Logits differ from those of `exact` by twice as much as one process's at most; all ranks are equal."""
    wanted = exact.alone()["logits"]
    error = (ranks[0]["logits"].float() - wanted).abs().max()
    assert error <= 2 * (model.alone()["logits"].float() - wanted).abs().max()
    for found in ranks:
        assert torch.equal(found["hidden"], ranks[0]["hidden"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MATRIX, ids=str)
def test_every_family_dtype_and_quantization_equals_one_rank(size: int, model: Model) -> None:
    check(model, run_ranks(size, model.job()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 6])
@pytest.mark.parametrize("variant", ["six", "six+tied"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_three_and_six_ranks_share_six_heads_and_three_kv_heads(size, variant, quantization):
    model = Model("qwen3_vl", variant, quantization=quantization)
    check(model, run_ranks(size, model.job()))


@pytest.mark.parametrize("model", FAULTY, ids=lambda model: model.fault)
def test_a_fault_of_a_rank_is_found(model: Model) -> None:
    with pytest.raises(AssertionError):
        check_equals_one_rank(model, run_ranks(2, model.job()))


@pytest.mark.parametrize("case", ["late", "dead"])
def test_a_collective_without_the_other_ranks_ends_with_an_error(errors: dict[str, str], case: str) -> None:
    """They do not come to it, or have ended."""
    assert "all-reduce of rank 0 of 2 failed" in errors[case]
