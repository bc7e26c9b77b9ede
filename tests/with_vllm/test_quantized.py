"""Checkpoints whose decoder is quantized, through vLLM, which computes with the numbers as they are.

The answers are those of vLLM alone, which encodes the pictures itself, and where only weights are rounded
those of `generate` with the floats that they stand for. Embeddings are the unquantized checkpoint's.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
import torch
from PIL import Image

from support.data.oracle import OracleResult, first_difference
from support.data.quantized import Format, awq, compressed, fp4, fp8, gptq, write_quantized
from support.data.traffic import Answer, Case, ask_all, expected, mixed_cases
from support.vllm_engine.alone import OFFLINE, run_alone
from support.vllm_engine.checkpoints import reseeded, vllm_checkpoint
from support.vllm_engine.encoders import EncoderProcess
from support.vllm_engine.engines import Engines
from support.vllm_engine.front_door import FrontDoor
from support.vllm_engine.server import HOME, vllm_environment
from triptych.models.checkpoint.quantized import IN_16_BITS

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

REQUESTS, TOKENS = 36, 12


@dataclass(frozen=True)
class Kind:
    """A format, the dtype of everything else, and how near the best two tokens are, in logarithms, where
    answers part."""

    form: Format
    dtype: str
    apart: float
    rounds_inputs: bool = False

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        lacks = not self.rounds_inputs and not torch.cpu._is_avx512_supported()
        reason = "vLLM's library for AVX2 has no cpu_gemm_wna16, its product with weights of 4 bits"
        return [pytest.mark.skipif(lacks, reason=reason)]


KINDS = {
    "ct-int8-w8a8": Kind(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "float32", 0.4, True
    ),
    "ct-fp8-w8a8": Kind(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "float32", 0.6, True
    ),
    "ct-int4-w4a16": Kind(
        compressed(
            "pack-quantized", rounds_inputs=False, num_bits=4, type="int", strategy="group", group_size=32
        ),
        "float16",
        0.1,
    ),
    "awq": Kind(awq(32), "float16", 0.1),
    "gptq": Kind(gptq(32), "float16", 0.1),
}


@dataclass
class Served:
    """A quantized checkpoint behind vLLM, its original, and the floats that it stands for."""

    kind: Kind
    source: Path
    quantized: Path
    floats: Path
    door: FrontDoor
    folder: Path
    cases: list[Case]

    @property
    def saved(self) -> list[Case]:
        """Those whose pictures an encoder of the original has encoded before."""
        return self.cases[:8]


@pytest.fixture(scope="module")
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 20)
    print(f"weights and requests are of seed {drawn}")
    return drawn


@pytest.fixture(scope="module", params=[pytest.param(name, marks=kind.marks) for name, kind in KINDS.items()])
def served(
    request: pytest.FixtureRequest, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    source = reseeded(vllm_checkpoint("qwen3_vl", folder / "source"), seed)
    quantized, floats = write_quantized(source, folder, kind.form, _is_decoders)
    engines = Engines.of(quantized, folder, 1, dtype=kind.dtype)
    door = FrontDoor(quantized, engines.store, engines.servers, folder, dtype=kind.dtype)
    served = Served(kind, source, quantized, floats, door, folder, mixed_cases(REQUESTS, seed=seed))
    encoder = EncoderProcess(source, engines.store.url, folder / "source.log", kind.dtype)
    try:
        engines.start()
        encoder.start()
        try:
            encoder.encode(*pictures(served.saved).values())
        finally:
            encoder.stop()
        door.start()
        yield served
    finally:
        door.stop()
        engines.stop()


def _is_decoders(key: str) -> bool:
    return "language_model.layers" in key and "norm" not in key


def pictures(cases: Sequence[Case]) -> dict[bytes, Image.Image]:
    return {image.tobytes(): image for case in cases for image in case.images}


def alone(served: Served) -> list[OracleResult]:
    """What vLLM answers that has the checkpoint alone and is given the pictures."""
    out = served.folder / "answers.json"
    asked = {
        "checkpoint": str(served.quantized),
        "dtype": served.kind.dtype,
        "conversations": [case.client_messages() for case in served.cases],
        "tokens": TOKENS,
        "out": str(out),
    }
    code, log = run_alone(served.folder, asked)
    assert code == 0, log[-4000:]
    return [
        OracleResult(one["prompt"], one["tokens"], one["margins"], one["runners_up"])
        for one in json.loads(out.read_text())
    ]


def assert_near(kind: Kind, references: Sequence[OracleResult], answers: Sequence[Answer]) -> None:
    """Equal, or parted where rounding may decide; and varied."""
    parted = []
    for number, (reference, answer) in enumerate(zip(references, answers, strict=True)):
        assert answer.prompt_token_ids == reference.prompt_token_ids
        if answer.token_ids == reference.token_ids:
            continue
        at = first_difference(reference.token_ids, answer.token_ids)
        parted.append((number, at, reference.margins[at], answer.token_ids[at] == reference.runners_up[at]))
    margins = [margin for reference in references for margin in reference.margins]
    print(f"parted: {parted}, of margins {median(margins):.2f} in the middle")
    assert all(margin < kind.apart and second for _, _, margin, second in parted), parted
    # Wrong rows or positions would part nearly all of those with pictures.
    assert len(parted) <= len(references) // 3
    assert len({tuple(reference.token_ids) for reference in references}) > len(references) // 2


async def test_36_requests_at_once_are_answered_as_by_vllm_alone(served):
    references = await asyncio.to_thread(alone, served)
    answers = await ask_all(served.door.urls[0], served.cases, TOKENS)
    assert_near(served.kind, references, answers)
    # Each picture once, but for those that the unquantized checkpoint's encoder has saved.
    new = pictures(served.cases).keys() - pictures(served.saved).keys()
    assert 0 < len(new) < len(pictures(served.cases))
    assert served.door.total("encoder", "triptych_encoder_tower_items_total") == len(new)
    if served.kind.rounds_inputs:
        return
    floats = await asyncio.to_thread(expected, served.floats, served.cases, TOKENS)
    assert_near(served.kind, floats, answers)
    # The rounding is in the answers, and more than what is tolerated.
    unrounded = await asyncio.to_thread(expected, served.source, served.saved, TOKENS)
    with pytest.raises(AssertionError):
        assert_near(served.kind, unrounded, answers[: len(unrounded)])


def test_the_formats_that_are_refused_in_float32_are_those_that_vllm_refuses():
    names = [*IN_16_BITS, "compressed-tensors"]
    program = (
        "import json; from vllm.model_executor.layers.quantization import get_quantization_config as of; "
        "dtypes = lambda name: object.__new__(of(name)).get_supported_act_dtypes(); "
        f"print(json.dumps({{name: list(map(str, dtypes(name))) for name in {names!r}}}))"
    )
    ended = subprocess.run(
        [str(HOME / "venv" / "bin" / "python"), "-c", program],
        env=vllm_environment() | OFFLINE,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    taken = json.loads(ended.stdout.splitlines()[-1])
    assert {name for name, dtypes in taken.items() if "torch.float32" not in dtypes} == IN_16_BITS.keys()
    assert all(f"torch.{dtype}" in taken[name] for name, dtype in IN_16_BITS.items())


NO_AMX = pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="a CPU with AMX has the kernel")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        pytest.param(
            fp8((32, 32)),
            "CPUFp8BlockScaledMMKernel requires AMX tile support (Sapphire Rapids or newer).",
            marks=NO_AMX,
        ),
        (fp8(None), "weight_scale_inv' in Qwen3LLMModel"),
        (fp4("nvfp4-pack-quantized"), "MarlinNvFp4LinearKernel is not supported: Marlin FP4 not available"),
        (fp4("mxfp4-pack-quantized"), "Failed to find a kernel that can implement the MXFP4 linear layer."),
    ],
    ids=["fp8-block", "fp8-tensor", "nvfp4", "mxfp4"],
)
def test_vllm_says_why_it_does_not_start_with_a_format(form, why, tmp_path):
    source = vllm_checkpoint("qwen3_vl", tmp_path / "source")
    quantized, _ = write_quantized(source, tmp_path, form, _is_decoders)
    job = {"checkpoint": str(quantized), "dtype": "bfloat16", "conversations": [], "tokens": 1, "out": ""}
    code, log = run_alone(tmp_path, job)
    assert code and why in log, log[-4000:]
