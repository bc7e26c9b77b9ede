"""How much a shape can serve at most, by its stages' costs alone: what a search begins at, and what it skips.

Reasoning: docs/when-to-disaggregate.md. Waiting is left out: these rates are above what is sustained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych_bench.goodput.load.workload import Workload
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.simulator.cluster.requests import JPEG_BYTES
from triptych_bench.simulator.cluster.shape import ClusterShape, Limits
from triptych_bench.simulator.costs.costs import CostModel, ModelShape
from triptych_bench.simulator.plan.question import PlannedDevice, Question

#: Of its core, what a proxy should take at most: above, waiting for it shows.
PROXY_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request of a workload asks on average. `fresh`: pictures that were not shown before;
    `prompt_squared`: mean of the squared prompt, of which attention takes half; `prompts`: tokens, and the
    share of requests with so many.
    """

    output_tokens: float
    prompt_tokens: float
    prompt_squared: float
    text_tokens: float
    pictures: float
    fresh: float
    patches: float
    patches_squared: float
    pixels: float
    picture_bytes: float
    prompts: tuple[tuple[float, float], ...] = ()


def demand_of(load: Workload, model: ModelShape) -> Demand:
    """Averages over the workload's weights."""
    sizes = [(width * height, *model.plan(width, height), weight) for width, height, weight in load.sizes]
    total = sum(weight for *_, weight in sizes)
    pixels, patches, rows = (sum(size[i] * size[3] for size in sizes) / total for i in range(3))
    counts = sum(weight for _, weight in load.images)
    text = model.prompt_overhead_tokens + load.text_tokens
    picture = rows + model.item_overhead_tokens
    prompts = [(text + count * picture, weight / counts) for count, weight in load.images]
    pictures = sum(count * weight for count, weight in load.images) / counts
    return Demand(
        output_tokens=load.output_tokens,
        prompt_tokens=sum(tokens * share for tokens, share in prompts),
        prompt_squared=sum(tokens * tokens * share for tokens, share in prompts),
        text_tokens=load.text_tokens,
        pictures=pictures,
        fresh=pictures * (1 - load.reuse),
        patches=patches,
        patches_squared=sum(size[1] ** 2 * size[3] for size in sizes) / total,
        pixels=pixels,
        picture_bytes=pixels * JPEG_BYTES[load.content],
        prompts=tuple(prompts),
    )


def proxy_seconds(load: Workload, costs: CostModel, model: ModelShape) -> float:
    """CPU seconds of a proxy for one request."""
    asked, proxy = demand_of(load, model), costs.proxy
    taken = proxy.take(asked.pictures, asked.pictures * asked.picture_bytes, asked.text_tokens)
    return taken + proxy.token * asked.output_tokens


def proxies_for(rate: float, seconds: float) -> int:
    """Proxies for `rate` requests per second of `seconds` each."""
    return max(1, math.ceil(rate * seconds / PROXY_SHARE))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Upper bounds in requests per second: of one encoder, one PD worker, one replica that is both, one
    prefill and one decode worker; and seconds of a step, and of a request's work on a PD worker.
    """

    encoder: float
    pd_worker: float
    replica: float
    step: float
    work: float
    prefill: float = math.inf
    decode: float = math.inf

    def bound(self, encoders: int, pd_workers: int) -> float:
        return min(encoders * self.encoder if encoders else math.inf, pd_workers * self.pd_worker)

    def of(self, shape: ClusterShape) -> float:
        """Workers that encode and decode are replicas."""
        both = sum(worker.encodes and worker.decodes for worker in shape.workers)
        if both:
            return both * self.replica
        if prefill := shape.prefill_workers:
            encoders = shape.encoders * self.encoder if shape.encoders else math.inf
            return min(encoders, prefill * self.prefill, (shape.pd_workers - prefill) * self.decode)
        return self.bound(shape.encoders, shape.pd_workers)

    def step_seconds(self, rate: float) -> float:
        """Of a PD worker that gets `rate`, at most nineteen twentieths of its bound."""
        return self.step / max(1 - min(rate, 0.95 * self.pd_worker) * self.work, 1e-3)


def estimate(question: Question, load: Workload | None = None) -> Estimate:
    """Of the question's devices under `load`, or its own."""
    device, encoders = question.device, question.encoders_on.costs
    asked = demand_of(question.workload if load is None else load, device.model)
    tower, apart = (_tower_seconds(asked, costs, device.limits) for costs in (device.costs, encoders))
    work = _work_seconds(asked, device.costs)
    prefill, decode = _role_rates(asked, device, question.slo)
    return Estimate(
        encoder=min(1 / apart if apart else math.inf, _prepared_rate(asked, encoders, device.limits)),
        pd_worker=_steps_rate(asked, work, device, question.slo),
        replica=min(
            _prepared_rate(asked, device.costs, device.limits),
            _steps_rate(asked, work + tower, device, question.slo),
        ),
        step=device.costs.pd.step,
        work=work,
        prefill=prefill,
        decode=decode,
    )


def best_counts(bounds: Estimate, devices: int) -> tuple[int, int]:
    """(encoders, PD workers) of so many devices with the highest bound; of two alike, with fewer encoders."""
    if math.isinf(bounds.encoder):
        return 0, devices
    # Where encoders and PD workers are busy alike: one of the two whole numbers around it.
    even = devices * bounds.pd_worker / (bounds.pd_worker + bounds.encoder)
    counts = {min(max(1, count), devices - 1) for count in (math.floor(even), math.ceil(even))}
    best = max(sorted(counts), key=lambda count: bounds.bound(count, devices - count))
    return best, devices - best


def _tower_seconds(asked: Demand, costs: CostModel, limits: Limits) -> float:
    """Of one request's fresh pictures, in the largest batches."""
    encoder = costs.encoder
    batch = max(1, min(limits.encoder.tower_credit, limits.encoder.batch_patches // asked.patches))
    each = encoder.tower_batch / batch + encoder.tower_item
    return asked.fresh * (
        each + encoder.tower_patch * asked.patches + encoder.tower_pair * asked.patches_squared
    )


def _prepared_rate(asked: Demand, costs: CostModel, limits: Limits) -> float:
    seconds = costs.encoder.prepare(round(asked.pixels)) * asked.fresh
    return limits.decode_threads / seconds if seconds else math.inf


def _work_seconds(asked: Demand, costs: CostModel) -> float:
    pd = costs.pd
    prefill = pd.prefill_token * asked.prompt_tokens + pd.prefill_context * asked.prompt_squared / 2
    return prefill + _decode_seconds(asked, costs)


def _decode_seconds(asked: Demand, costs: CostModel) -> float:
    pd, context = costs.pd, asked.prompt_tokens + asked.output_tokens / 2
    return asked.output_tokens * (pd.decode_seq + pd.context_token * context)


def _role_rates(asked: Demand, device: PlannedDevice, slo: Slo) -> tuple[float, float]:
    """Of one prefill worker, which has long prompts alone, and of one decode worker, which has all else."""
    costs, limits = device.costs.pd, device.limits
    long = short = short_tokens = 0.0
    for tokens, share in asked.prompts:
        seconds = costs.prefill_token * tokens + costs.prefill_context * tokens * tokens / 2
        if tokens < limits.proxy.prefill_threshold:
            short, short_tokens = short + share * seconds, short_tokens + share * tokens
        else:
            long += share * (seconds + costs.step * tokens / limits.pd.step_tokens)
    work = short + _decode_seconds(asked, device.costs)
    return 1 / long if long else math.inf, _steps_rate(asked, work, device, slo, short_tokens)


def _steps_rate(
    asked: Demand, work: float, device: PlannedDevice, slo: Slo, prefilled: float | None = None
) -> float:
    """`prefilled`: tokens of a request that are prefilled there; None: its prompt."""
    prefilled = asked.prompt_tokens if prefilled is None else prefilled
    step, limits = device.costs.pd.step, device.limits.pd
    longest = min(slo.seconds("tpot"), slo.seconds("e2el") / asked.output_tokens)
    held = limits.kv_memory / device.model.kv_token_bytes / (asked.prompt_tokens + asked.output_tokens)
    sequences, budget = min(limits.max_num_seqs, held), limits.step_tokens / 2
    rates = [
        (1 - step / longest) / work,
        sequences / (asked.output_tokens * step + sequences * work),
        budget / (prefilled * step + budget * work),
    ]
    return max(0.0, min(rates))
