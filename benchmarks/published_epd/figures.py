"""The published comparison of 1E3PD with four replicas, and what of it the cost models were fitted to.

vLLM's report of its encoder disaggregation (blog.vllm.ai, 15 December 2025): four A100 80GB,
Qwen3-VL-4B-Instruct, 400 (short) or 2000 (long) tokens of text, 1 to 4 pictures of 640x640, 150 tokens out;
sustained requests per second with P99 TTFT within 20 s and P99 TPOT within 100 ms, swept from 4 to 24.

The roofline of `published` does not explain its baseline: by FLOPs, four A100 could encode hundreds of such
pictures per second, and the report has 23 or 24 with short texts, alone or four to a request. What fits is a
front door that tokenises and preprocesses for all replicas, at a cost per picture and per token of text.
In 1E3PD the encoder has a front door of its own. That it is the door is our reading, not the report's.

Three constants are fitted, each to figures named beside it; all other figures are left to test them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.simulator.costs.costs import CostModel, ProxyCosts
from triptych.simulator.costs.published import published

GPU = "a100-80g"
TEXT_TOKENS = {"short": 400, "long": 2000}
#: A front door's CPU seconds per picture and per token of text: the two that give `short-4` and `long-1` of
#: the replicas. 4 x 37.28 ms + 400 x 43.86 µs = 1 / 6 s; 37.28 ms + 2000 x 43.86 µs = 1 / 8 s.
DOOR_ITEM = 37.281e-3
DOOR_TOKEN = 43.860e-6
#: Seconds per picture in the encoder's own front door, one thread: gives `short-4` of 1E3PD, 48 pictures/s.
ENCODER_DOOR_ITEM = 1 / 48


@dataclass(frozen=True, slots=True)
class Figure:
    """Sustained requests per second of both; None where the report does not tell. `fitted` names whose figure
    a constant was made of.
    """

    text: str
    images: int
    replicas: float | None
    disaggregated: float | None
    fitted: tuple[str, ...] = ()


#: "3 or 4 pictures: 4" is one statement about both. 24 is the end of the sweep: more may have been possible.
FIGURES = (
    Figure("short", 1, 23, 24),
    Figure("short", 4, 6, 12, ("replicas", "disaggregated")),
    Figure("long", 1, 8, 18, ("replicas",)),
    Figure("long", 2, None, 11),
    Figure("long", 3, 4, 9),
    Figure("long", 4, 4, 8),
)


def replicas() -> CostModel:
    """Four replicas behind one front door, for shape `colocated(4)`: pictures are prepared at the door."""
    costs = published(GPU)
    door = ProxyCosts(
        request=0.0, media_byte=0.0, token=costs.proxy.token, item=DOOR_ITEM, prompt_token=DOOR_TOKEN
    )
    return replace(
        costs,
        name="replicas behind one front door, A100",
        source=f"{costs.source}; front door fitted, see benchmarks/published_epd/figures.py",
        encoder=replace(costs.encoder, prepare_item=0.0, prepare_pixel=0.0),
        proxy=door,
    )


def disaggregated() -> CostModel:
    """1E3PD, for shape `on_devices(1, 3)` and one decode thread (`EncoderConfig(decode_threads=1)`)."""
    costs = published(GPU)
    return replace(
        costs,
        name="1E3PD, A100",
        source=f"{costs.source}; encoder's door fitted, see benchmarks/published_epd/figures.py",
        encoder=replace(costs.encoder, prepare_item=ENCODER_DOOR_ITEM, prepare_pixel=0.0),
    )
