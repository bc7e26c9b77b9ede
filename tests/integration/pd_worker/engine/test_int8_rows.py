"""With rows in 8 bits the engine answers as with the same ones in floating point: chunks, cross-attention."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.sounds import sound
from support.encdec.cell import EncDecCheckpoint
from support.encdec.oracle import audio_inputs
from support.engine.engine_cell import Checkpoint, EngineCell, engine_cell, reference
from support.engine.prompts import THREE, TWICE
from triptych.base.types import INT8, MMFeature
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.int8_rows import packed, unpacked
from triptych.encoder_worker.loading import scales_of
from triptych.pd_worker.core.request import EngineRequest

TOKENS = 24


def twice(cell: EngineCell, request: EngineRequest, scales: int) -> list[list[int]]:
    """Answers to the request, with its rows in 8 bits and with what these are in float32."""
    answers = []
    for stored in (True, False):
        features = []
        for feature in request.features:
            own = cell.store[feature.mm_hash]
            rows = packed(own.data, scales)
            key = hashlib.sha256(f"{feature.mm_hash} {stored}".encode()).hexdigest()
            plan = replace(own.plan, mm_hash=key)
            if stored:
                plan = replace(plan, dtype=INT8, scales=scales)
            cell.store[key] = EncoderOutput(plan, rows if stored else unpacked(rows, scales))
            features.append(MMFeature(plan, feature.placement))
        ready = frozenset(feature.mm_hash for feature in features)
        name = f"{request.request_id} {stored}"
        again = replace(request, request_id=name, features=tuple(features), ready=ready, output_token_ids=[])
        again.output = type(request.output)(TOKENS)
        answers += cell.finish([again])
    return answers


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_pictures_cut_into_chunks(family: str) -> None:
    checkpoint = Checkpoint.open(family)
    scales = scales_of(checkpoint.path, checkpoint.encoder.width)
    with engine_cell(checkpoint, max_num_batched_tokens=33) as cell:
        for prompt in (THREE, TWICE):
            tokens = reference(checkpoint.path, prompt, TOKENS).prompt_token_ids
            first, second = twice(cell, cell.request(prompt, tokens, TOKENS), scales)
            assert first == second and len(first) == TOKENS
        cell.assert_at_rest()


def test_a_sound_that_is_attended_to() -> None:
    checkpoint = EncDecCheckpoint.open(build_checkpoint("whisper"))
    inputs = audio_inputs(checkpoint.path, sound(3.0, seed=1))
    with engine_cell(checkpoint, max_model_len=0) as cell:
        prompt = list(checkpoint.decoder.prompt_defaults({}).token_ids)
        request = checkpoint.request(cell, inputs, prompt, TOKENS)
        first, second = twice(cell, request, 1)
        assert first == second and len(first) == TOKENS
        cell.assert_at_rest()
