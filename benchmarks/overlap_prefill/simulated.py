"""Time to first token with and without --overlap-prefill in the simulator, over ratios and loads."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from triptych.config import GIB, EncoderConfig, PDConfig, ProxyConfig
from triptych.errors import ConfigError
from triptych.goodput.load.arrivals import Arrivals, arrival_times
from triptych.goodput.load.record import RequestRecord
from triptych.goodput.load.workload import Workload, plan_requests
from triptych.simulator.cluster.shape import ClusterShape, Limits, colocated, on_devices
from triptych.simulator.costs.costs import (
    CostModel,
    EncoderCosts,
    ModelShape,
    PDCosts,
    ProxyCosts,
    chunk_context,
)
from triptych.simulator.plan.question import read_device
from triptych.simulator.run import simulate

#: Pictures of a request, and their sides in pixels.
PICTURES, SIDE = 4, 1024
ENCODERS = 2
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LOAD_RATIOS = (0.5, 2.0, 8.0)
LOADS = (0.5, 0.8, 0.95)


@dataclass(frozen=True, slots=True)
class Device:
    """Costs of a cluster, and the sizes of its model."""

    name: str
    costs: CostModel
    model: ModelShape
    limits: Limits

    @property
    def patches(self) -> int:
        return self.model.plan(SIDE, SIDE)[0]

    @property
    def prefill(self) -> float:
        """Seconds of a whole prompt in steps as large as may be, without what stands beside the pictures."""
        tokens, budget = PICTURES * self.model.plan(SIDE, SIDE)[1], self.limits.pd.max_num_batched_tokens
        return sum(
            self.costs.pd.step_seconds(count, 0, 0, chunk_context(start, count))
            for start in range(0, tokens, budget)
            for count in (min(budget, tokens - start),)
        )

    def with_ratio(self, ratio: float) -> Device:
        """The same with a tower that takes one picture in the prompt's prefill time ÷ `ratio`."""
        tower = self.costs.encoder
        factor = self.prefill / ratio / tower.tower(1, self.patches)
        slower = replace(
            tower,
            tower_batch=tower.tower_batch * factor,
            tower_item=tower.tower_item * factor,
            tower_patch=tower.tower_patch * factor,
            tower_pair=tower.tower_pair * factor,
        )
        return replace(self, costs=replace(self.costs, encoder=slower))

    def capacity(self, ratio: float, encoders: int = ENCODERS) -> float:
        """Requests per second that the slower of both pools can do."""
        return min(1.0, encoders * ratio / PICTURES) / self.prefill


def bare() -> Device:
    """Costs of which the tower and a prefill that grows with its tokens are nearly all: 0.2 s a prompt."""
    costs = CostModel(
        "bare",
        "made up",
        EncoderCosts(1e-3, 0.0, 0.0, 0.0, 2.5e-5, 1e-3, 0.0),
        PDCosts(1e-3, 4.7e-5, 1e-5, 0.0, 0.0, 1e-3, 0.0),
        ProxyCosts(1e-3, 0.0, 1e-5),
        3e-4,
    )
    shape = ModelShape(16, 2, 4096, 1 << 24, 1024, 1000, 20)
    # One picture at a time: several in one batch are all done when the last one is.
    encoder = EncoderConfig(device="cuda", encoder_batch_patches=1)
    pd = PDConfig(kv_memory=GIB, encoder_cache_memory=GIB, max_num_seqs=128, max_num_batched_tokens=512)
    return Device("bare", costs, shape, Limits(ProxyConfig(max_queue=100_000), encoder, pd))


def published(name: str) -> Device:
    """A device of `triptych plan`, one picture in a batch."""
    device = read_device(name)
    encoder = EncoderConfig(device="cuda", encoder_batch_patches=1)
    return Device(name, device.costs, device.model, replace(device.limits, encoder=encoder))


def records(
    device: Device, shape: ClusterShape, times: Sequence[float], output: int, *, overlap: bool
) -> tuple[RequestRecord, ...]:
    """Requests of four pictures that nobody has seen before, sent at `times`."""
    limits = replace(device.limits, pd=replace(device.limits.pd, overlap_prefill=overlap))
    load = Workload(32, output, ((PICTURES, 1.0),), ((SIDE, SIDE, 1.0),))
    found = simulate(
        plan_requests(load, len(times), 1), times, shape, device.costs, device.model, limits
    ).records
    if failed := [record.error for record in found if record.error]:
        raise ConfigError(f"{len(failed)} simulated requests failed: {failed[0]}")
    return found


@dataclass(frozen=True, slots=True)
class Gain:
    """Figures with overlap by those without: `wait` and `overlap` are mean TTFTs in seconds."""

    wait: float
    overlap: float
    p90: float = 0.0
    tpot: float = 0.0

    @property
    def ratio(self) -> float:
        return self.overlap / self.wait


def alone(device: Device, ratio: float) -> Gain:
    """Of a request that has the cluster for itself."""
    shape = on_devices(ENCODERS, 1)
    wait, overlap = (
        records(device.with_ratio(ratio), shape, [0.0], 1, overlap=switch)[0].ttft for switch in (False, True)
    )
    return Gain(wait, overlap)


def bound(ratio: float) -> float:
    """What nothing but encoding and an even prefill would give.

    E is a picture's encode time, P the prompt's prefill. Waiting takes 2E + P. With overlap the first half is
    prefilled from E on, the second once both this and all pictures are done: max(2E, E + P/2) + P/2.
    """
    rounds = PICTURES / ENCODERS
    return (max(rounds, 1 + ratio / 2) + ratio / 2) / (rounds + ratio)


def loaded(device: Device, ratio: float, load: float, count: int, shape: ClusterShape | None = None) -> Gain:
    """Under Poisson arrivals of `load` times the capacity, with 16 tokens of output each."""
    shape = shape or on_devices(ENCODERS, 1)
    times = arrival_times(Arrivals(rate=load * device.capacity(ratio)), count, 1)
    wait, overlap = (
        records(device.with_ratio(ratio), shape, times, 16, overlap=switch) for switch in (False, True)
    )
    both = [sorted(record.ttft for record in side) for side in (wait, overlap)]
    means = [statistics.mean(side) for side in both]
    late = [side[int(0.9 * len(side))] for side in both]
    between = [statistics.mean(itl for record in side for itl in record.itls) for side in (wait, overlap)]
    return Gain(means[0], means[1], late[1] / late[0], between[1] / between[0])


def alone_rows(devices: Sequence[Device]) -> Iterator[str]:
    """A line of the table for each ratio."""
    for ratio in RATIOS:
        gains = [alone(device, ratio) for device in devices]
        cells = [f"{gain.wait * 1e3:.0f} → {gain.overlap * 1e3:.0f}: **{gain.ratio:.2f}**" for gain in gains]
        yield f"| {ratio:g} | {bound(ratio):.2f} | {' | '.join(cells)} |"


def loaded_rows(device: Device, count: int) -> Iterator[str]:
    for ratio in LOAD_RATIOS:
        for load in LOADS:
            gain = loaded(device, ratio, load, count)
            yield (
                f"| {ratio:g} | {load:g} | {gain.wait * 1e3:.0f} | **{gain.ratio:.2f}** | {gain.p90:.2f} | "
                f"{gain.tpot:.2f} |"
            )


def colocated_rows(device: Device, count: int) -> Iterator[str]:
    """Two replicas whose tower and decoder share a device; the ratio's capacity is that of both stages."""
    for ratio in LOAD_RATIOS:
        rate = 2 / (device.prefill * (1 + PICTURES / ratio))
        gain = loaded(device, ratio, 0.6 * rate / device.capacity(ratio), count, colocated(2))
        yield (
            f"| {ratio:g} | {gain.wait * 1e3:.0f} | **{gain.ratio:.2f}** | {gain.p90:.2f} | {gain.tpot:.2f} |"
        )
