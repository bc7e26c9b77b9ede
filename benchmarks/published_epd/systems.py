"""The published systems and loads, with what the report says of them, and a simulated window of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from triptych.base.config import EncoderConfig
from triptych.goodput.load.job import RequestRecord
from triptych.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests
from triptych.simulator.cluster.shape import ClusterShape, Limits, colocated, on_devices
from triptych.simulator.costs.costs import CostModel, ProxyCosts, published
from triptych.simulator.plan.question import read_device
from triptych.simulator.run import simulate

GPU = "a100-80g"
#: Seconds before a window in which requests are not measured.
WARM_UP = 20.0
#: A front door's CPU seconds per picture and per token of text: the two that give `short-4` and `long-1` of
#: the replicas. 4 x 37.28 ms + 400 x 43.86 µs = 1 / 6 s; 37.28 ms + 2000 x 43.86 µs = 1 / 8 s.
DOOR_ITEM = 37.281e-3
DOOR_TOKEN = 43.860e-6
#: Seconds per picture in the encoder's own front door, one thread: gives `short-4` of 1E3PD, 48 pictures/s.
ENCODER_DOOR_ITEM = 1 / 48


@dataclass(frozen=True, slots=True)
class Figure:
    """Sustained requests per second of SYSTEMS; None where the report does not tell. `fitted` names whose
    figure a constant was made of.
    """

    text: str
    images: int
    stated: tuple[float | None, float | None]
    fitted: tuple[str, ...] = ()


SYSTEMS = ("replicas", "1E3PD")
#: "3 or 4 pictures: 4" is one statement about both. 24 is the end of the sweep: more may have been possible.
FIGURES = (
    Figure("short", 1, (23, 24)),
    Figure("short", 4, (6, 12), SYSTEMS),
    Figure("long", 1, (8, 18), SYSTEMS[:1]),
    Figure("long", 2, (None, 11)),
    Figure("long", 3, (4, 9)),
    Figure("long", 4, (4, 8)),
)


def replicas() -> CostModel:
    """Four replicas behind one front door, for shape `colocated(4)`: pictures are prepared at the door."""
    costs = published(GPU)
    door = ProxyCosts(
        request=0.0, media_byte=0.0, token=costs.proxy.token, item=DOOR_ITEM, prompt_token=DOOR_TOKEN
    )
    return replace(costs, encoder=replace(costs.encoder, prepare_item=0.0, prepare_pixel=0.0), proxy=door)


def disaggregated() -> CostModel:
    """1E3PD, for shape `on_devices(1, 3)` and one decode thread (`EncoderConfig(decode_threads=1)`)."""
    costs = published(GPU)
    encoder = replace(costs.encoder, prepare_item=ENCODER_DOOR_ITEM, prepare_pixel=0.0)
    return replace(costs, encoder=encoder)


@dataclass(frozen=True, slots=True)
class PublishedSystem:
    """One column: `fitted` says whether its costs have the doors that were fitted to the report."""

    name: str
    shape: ClusterShape
    costs: CostModel
    limits: Limits


def systems() -> tuple[PublishedSystem, ...]:
    """Replicas and 1E3PD with the doors of the report; then both without."""
    limits = read_device("a100").limits
    door = replace(limits, encoder=EncoderConfig(device="cuda", decode_threads=1))
    free = published(GPU)
    # A proxy of ours is multiplied where one is not enough; that is not what is compared here.
    free = replace(
        free, proxy=replace(free.proxy, request=0.0, item=0.0, media_byte=0.0, token=0.0, prompt_token=0.0)
    )
    return (
        PublishedSystem("replicas", colocated(4), replicas(), limits),
        PublishedSystem("1E3PD", on_devices(1, 3), disaggregated(), door),
        PublishedSystem("replicas, no door", colocated(4), free, limits),
        PublishedSystem("1E3PD, no door", on_devices(1, 3), free, limits),
    )


def window(
    system: PublishedSystem,
    load: Workload,
    rate: float,
    seconds: float,
    enough: Callable[[RequestRecord], bool] | None = None,
) -> tuple[RequestRecord, ...]:
    """Records of one simulated window of the harness's length; it ends early where `enough` says so."""
    warm_up, measured = math.ceil(rate * WARM_UP), math.ceil(rate * seconds)
    result = simulate(
        plan_requests(load, warm_up + measured, 0),
        arrival_times(Arrivals(rate=rate), warm_up + measured, 0),
        system.shape,
        system.costs,
        read_device("a100").model,
        system.limits,
        warm_up=warm_up,
        enough=enough,
    )
    return result.records
