"""The PD worker's stages: prefill by context, decode steps, sampling."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.device_limits import decoder_size
from benchmarks.micro.engine_decode import engine_round, make_engine, make_requests, prefill_steps
from benchmarks.stages.work import Limits, Stage, median_seconds
from triptych.base.config import GIB
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.runner.sampler import SamplerInput, sample

#: Sequences that decode, and tokens of each.
STEPS = ((1, 100), (16, 100), (16, 480))
#: Rows of a picture of 320 x 320, which has so many patches by four, and a prompt with it.
ROWS, PROMPT = 100, 132
#: Tokens of one prefill step, and the contexts before them.
CHUNK, CONTEXTS = 512, (0, 512, 1024, 1536)
_STEPS_EACH = 16


def decoding(model: Path, dtype: torch.dtype, found: Limits, rounds: int) -> Iterator[Stage]:
    """A stage for each of CONTEXTS and STEPS, and one for sampling."""
    engine = make_engine(
        model,
        "cpu",
        dtype,
        max_model_len=CONTEXTS[-1] + CHUNK + 2,
        kv_memory=GIB,
        max_num_batched_tokens=CHUNK,
    )
    decoder = engine.runner._decoder
    size = decoder_size(decoder)
    times = [prefill_times(engine, turn) for turn in range(rounds + 1)][1:]
    for place, context in enumerate(CONTEXTS):
        least = size.prefill(CHUNK, context).flops / found.product
        taken = statistics.median(one[place] for one in times)
        yield Stage(f"prefill of {CHUNK} tokens at context {context}", taken, least, "matrix product")
    alone = statistics.median([prefill_times(engine, turn, PROMPT)[0] for turn in range(4 * rounds + 1)][1:])
    least = size.prefill(PROMPT).flops / found.product
    yield Stage(f"prefill of {PROMPT} tokens at context 0", alone, least, "matrix product")
    yield inject(decoder.geometry.hidden_size, dtype)
    for sequences, context in STEPS:
        taken = statistics.median([step_seconds(engine, sequences, context) for _ in range(rounds + 1)][1:])
        # The step's middle: half of its tokens have been added.
        middle = context + _STEPS_EACH // 2
        least = size.decode(sequences, middle).nbytes / found.read
        yield Stage(f"decode step of {sequences} at context {context}", taken, least, "reading")
    logits = torch.randn(16, engine.runner.vocab_size, dtype=dtype)
    greedy = ResolvedSampling(64, 0, 0.0, 1.0, 0, 0, (), frozenset(), True, ())
    rows = [SamplerInput(greedy, [1], 1)] * 16
    taken = median_seconds(lambda: sample(logits, rows), 20)
    yield Stage("greedy sampling of 16", taken)


def prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    seeded = random.Random(seed)
    return [seeded.randrange(vocabulary // 2) for _ in range(length)]


def inject(width: int, dtype: torch.dtype) -> Stage:
    """A picture's rows put in the places of a prompt's hidden states."""
    hidden, rows = torch.zeros(PROMPT, width, dtype=dtype), torch.ones(ROWS, width, dtype=dtype)
    places = torch.arange(4, 4 + ROWS)
    taken = median_seconds(lambda: hidden.index_copy_(0, places, rows), 50)
    return Stage(f"inject of {ROWS} rows", taken)


def prefill_times(engine: Engine, seed: int, length: int = CONTEXTS[-1] + CHUNK) -> list[float]:
    """Seconds of each step of one prompt, by default one that takes a step for each of CONTEXTS."""
    tokens = prompt(seed, length, engine.runner.vocab_size)
    (request,) = make_requests(engine, [tokens], 1, engine.runner.position_rows)
    engine.scheduler.check(request)
    engine.scheduler.add(request, 0.0)
    found = []
    while not request.output_token_ids:
        began = time.perf_counter()
        scheduled = engine.scheduler.schedule(0.0)
        engine.scheduler.update(scheduled, engine.runner.execute(scheduled), 0.0)
        found.append(time.perf_counter() - began)
    return found


def step_seconds(engine: Engine, sequences: int, context: int) -> float:
    """Of a step in which all decode, over at least `_STEPS_EACH` steps."""
    prompts = [prompt(index, context, engine.runner.vocab_size) for index in range(sequences)]
    tokens = _STEPS_EACH + 1 + prefill_steps(sequences, context, CHUNK)
    requests = make_requests(engine, prompts, tokens, engine.runner.position_rows)
    return sequences / engine_round(engine, requests).tokens_per_second
