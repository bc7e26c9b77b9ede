"""Times of a PD worker: steps of the real scheduler, runner, sampler, text and events, and its input."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from triptych.base.config import PDConfig
from triptych.base.metrics import PDMetrics
from triptych.base.progress import Progress
from triptych.base.types import SamplingParams
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.ec_connector.connectors.store_client import LoopThread
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.sampling import resolve
from triptych.pd_worker.events.streams import EventStream, EventStreams
from triptych.pd_worker.frontend.prompt import PromptBuilder
from triptych.pd_worker.frontend.tokenization import OutputText
from triptych.pd_worker.native import build_engine
from triptych.pd_worker.runner.capacity import block_bytes
from triptych.pd_worker.runner.step_metrics import StepMetrics
from triptych_bench.simulator.costs.costs import step_work
from triptych_bench.simulator.profile.fit import TERMS, Effort, Sample, in_time, sample_of, stage_left, timed

_PROXY = "profile"
#: Decode steps of one batch: each is measured.
_DECODE_STEPS = 6
_MODEL_LEN = 4096
#: Words of the prompts whose intake is measured.
_LENGTHS = (1, 512, 64, 256, 16, 1024, 128, 32)
#: Terms and seconds of a step.
Step = tuple[dict[str, float], float]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`decodes` sequences of `context` tokens decode; then prompts of `prefills` tokens join, one by one."""

    decodes: int
    context: int
    prefills: tuple[int, ...]

    @property
    def output_tokens(self) -> int:
        """So many that none of the sequences ends before the last step."""
        return _DECODE_STEPS + len(self.prefills) + 2 * self.decodes + 8

    @property
    def tokens(self) -> int:
        """Tokens that its sequences hold in the KV cache."""
        return self.decodes * (self.context + self.output_tokens)


def scenarios(
    config: PDConfig, max_len: int, *, quick: bool = False, max_tokens: int = sys.maxsize
) -> list[Scenario]:
    """Cheap ones first: what has no time left is dropped from the end. None holds above `max_tokens`."""
    budget, longest = config.step_tokens, max_len // 2
    half = max(1, budget // 2)
    result = [Scenario(0, 0, _distinct((16, 64, 128, half, budget, 2 * budget, 4 * budget), longest))]
    joining = _distinct((half,) if quick else (16, 64, half // 2, half), longest)
    for context in _distinct((32, 512) if quick else (32, 256, 1024), longest):
        for count in _distinct((1, 4, 16) if quick else (1, 2, 4, 8, 16, 32), config.max_num_seqs):
            result.append(Scenario(count, context, joining))
    return sorted((s for s in result if s.tokens <= max_tokens), key=lambda scenario: scenario.tokens)


def _distinct(values: Sequence[int], maximum: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for value in values if 1 <= value <= maximum))


def pd_config(served: PDConfig, decoder: DecoderSide, grid: Sequence[Scenario]) -> PDConfig:
    """The served settings, with a KV cache that keeps the grid's sequences from one round to the next."""
    length, held = model_len(decoder), dict.fromkeys((scenario.context for scenario in grid), 0)
    for scenario in grid:
        held[scenario.context] = max(held[scenario.context], scenario.tokens)
    blocks = -(-(2 * length + sum(held.values())) // served.block_size) + 2 * served.max_num_seqs
    nbytes = block_bytes(decoder.geometry, served.block_size, decoder.dtype)
    return replace(served, kv_memory=blocks * nbytes, max_model_len=length)


def model_len(decoder: DecoderSide) -> int:
    """Longest sequence that is measured."""
    return min(decoder.geometry.max_position_embeddings, _MODEL_LEN)


class StepBench:
    """An engine whose steps are driven and timed here; its events go through event streams."""

    def __init__(
        self, config: PDConfig, decoder: DecoderSide, tokenizer: Any, defaults: GenerationDefaults
    ) -> None:
        transfers, metrics = ECTransferConfig(connector="memory", store=MemoryStore()), PDMetrics("profile")
        self._engine = build_engine(config, decoder, transfers, lambda events: None, metrics)
        self._metrics = StepMetrics(metrics, "profile")
        self._decoder, self._tokenizer, self._defaults = decoder, tokenizer, defaults
        self._rng = random.Random(0)
        self._kept: defaultdict[int, list[list[int]]] = defaultdict(list)
        self._count = 0
        self._loop = LoopThread("events")
        self._streams, stream = self._loop.submit(_open_streams()).result()
        self._reader = self._loop.submit(_read(stream))

    def close(self) -> None:
        async def end() -> None:
            self._streams.shut_down()

        self._loop.stop(end())

    def run(self, scenario: Scenario, note: Callable[[str, Step], None]) -> None:
        """One round of the scenario; `note` gets every step that counts, with the phase it belongs to."""
        with self._requests() as started:
            # The same sequences every round: after the first, the prefix cache has all but their ends.
            kept = self._kept[scenario.context]
            kept.extend(self._random(scenario.context) for _ in range(scenario.decodes - len(kept)))
            decoding = [started(tokens, scenario.output_tokens) for tokens in kept[: scenario.decodes]]
            while not all(request.output_token_ids for request in decoding):
                self._step()
            for _ in range(_DECODE_STEPS if decoding else 0):
                note("decode", self._step())
            for length in scenario.prefills:
                request, number = started(self._random(length), 1), 0
                while not request.output_token_ids:
                    note(f"prefill {length} {number}", self._step())
                    number += 1

    @contextmanager
    def _requests(self) -> Iterator[Callable[[list[int], int], EngineRequest]]:
        scheduler, names = self._engine.scheduler, list[str]()

        def started(tokens: list[int], max_tokens: int) -> EngineRequest:
            request = self._request(tokens, max_tokens)
            names.append(request.request_id)
            self._in_loop(lambda: self._streams.open(_PROXY, request.request_id, 1))
            scheduler.check(request)
            scheduler.add(request, 0.0)
            return request

        try:
            yield started
        finally:
            scheduler.cancel(names, _PROXY)
            self._step()
            self._in_loop(lambda: self._streams.cancel(_PROXY, names))

    def _step(self) -> Step:
        engine, began = self._engine, time.perf_counter()
        output = engine.scheduler.schedule(0.0)
        terms = dict(zip(TERMS["step"], (1.0, *step_work(output.chunks)), strict=True))
        result = engine.runner.execute(output)
        events = engine.scheduler.update(output, result, 0.0)
        self._metrics.record(engine.scheduler.collect_stats(), output, events)
        self._streams.emit(events)
        seconds = time.perf_counter() - began
        if result.error is not None:
            raise result.error
        return terms, seconds

    def _request(self, tokens: list[int], max_tokens: int) -> EngineRequest:
        self._count += 1
        # As the load generators ask: greedy, and on past the end of the sequence.
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        sampling = resolve(params, self._defaults, len(tokens), self._engine.max_model_len)
        positions, delta = self._decoder.positions(tokens, ())
        assert len(positions) == self._decoder.geometry.position_rows
        output = OutputText(self._tokenizer, sampling)
        return engine_request(self._count, tokens, positions, sampling, output, delta)

    def _random(self, length: int) -> list[int]:
        """Token ids without the image token."""
        vocabulary, image = self._decoder.geometry.vocab_size // 2, self._decoder.image_token_id
        drawn = (self._rng.randrange(vocabulary) for _ in range(length))
        return [token if token != image else 0 for token in drawn]

    def _in_loop(self, work: Callable[[], object]) -> None:
        async def run() -> None:
            work()

        self._loop.submit(run()).result()


def engine_request(
    number: int, tokens: list[int], positions: Any, sampling: Any, output: Any, delta: int = 0
) -> EngineRequest:
    """A request of text for an engine that is driven by hand."""
    return EngineRequest(
        request_id=f"r{number}",
        attempt=1,
        proxy_id=_PROXY,
        arrival=float(number),
        deadline=float("inf"),
        prompt_token_ids=tokens,
        features=(),
        ready=frozenset(),
        positions=positions,
        position_delta=delta,
        sampling=sampling,
        prefix_root=bytes(32),
        output=output,
    )


async def _open_streams() -> tuple[EventStreams, EventStream]:
    streams = EventStreams(lambda request_ids, proxy_id: None)
    return streams, streams.attach(_PROXY, [])


async def _read(stream: EventStream) -> None:
    """What the gRPC server does with each message, short of the socket."""
    while (message := await stream.next()) is not None:
        message.SerializeToString()


def step_samples(bench: StepBench, grid: Sequence[Scenario], effort: Effort) -> list[Sample]:
    """One sample for every step of every scenario; the grid is gone through `effort.repeats` times, so that
    what else the machine does meets all alike.
    """
    began = time.perf_counter()
    result: dict[tuple[int, str], list[Step]] = defaultdict(list)
    runs, total = 0, (effort.repeats + 1) * len(grid)
    with Progress("the decoder's steps", total, "runs") as running:
        for turn in range(effort.repeats + 1):
            for index, scenario in enumerate(grid):
                late = time.perf_counter() - began > effort.stage_seconds
                # The cheaper half is measured, however long that takes.
                if late and (turn > 1 or index > len(grid) // 2):
                    break
                if turn == 0:
                    bench.run(scenario, lambda phase, taken: None)
                bench.run(scenario, lambda phase, taken, at=index: result[at, phase].append(taken))  # type: ignore[misc]
                runs += 1
                running.advance(left=stage_left(time.perf_counter() - began, runs / total, effort))
            if time.perf_counter() - began > effort.stage_seconds:
                break
    # Contexts of alike steps differ by a few tokens.
    return [
        sample_of(
            {name: statistics.fmean(terms[name] for terms, _ in steps) for name in TERMS["step"]},
            [seconds for _, seconds in steps],
        )
        for steps in result.values()
    ]


def intake_samples(prompts: PromptBuilder, decoder: DecoderSide, effort: Effort) -> list[Sample]:
    """Chat prompts of text; their tokens, template included, are counted after they are made."""

    def sample(words: int) -> Sample:
        text = " ".join(f"word{index % 10}" for index in range(words))
        messages = json.dumps([{"role": "user", "content": text}]).encode()

        def work() -> None:
            prompt = prompts.build(messages, [])
            decoder.positions(prompt.token_ids, prompt.features)

        tokens = len(prompts.build(messages, []).token_ids)
        return timed(work, {"take_request": 1, "take_token": tokens}, effort)

    return in_time("prompts", map(sample, _LENGTHS), len(_LENGTHS), effort)
