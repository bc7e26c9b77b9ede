"""Workloads: what requests are made of. Planning is pure and decided by the seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.errors import ConfigError

#: Pictures of different windows and seeds never meet: a cache must not answer for them.
_SEED_SPACE = 1 << 48


@dataclass(frozen=True, slots=True)
class Workload:
    """`images`: (pictures in a request, weight); `sizes`: (width, height, weight), drawn for every picture.

    `reuse` is the chance that a picture is one that an earlier request has already shown. Lengths are in
    tokens and drawn uniformly from ± their spread (0 to 1).
    """

    text_tokens: int = 32
    output_tokens: int = 64
    images: tuple[tuple[int, float], ...] = ((0, 1.0),)
    sizes: tuple[tuple[int, int, float], ...] = ((320, 320, 1.0),)
    reuse: float = 0.0
    text_spread: float = 0.0
    output_spread: float = 0.0
    content: str = "noise"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture to draw: equal values give equal bytes."""

    seed: int
    width: int
    height: int
    content: str = "noise"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What one request asks."""

    seed: int
    text_tokens: int
    output_tokens: int
    pictures: tuple[Picture, ...] = ()


def check_workload(load: Workload) -> None:
    """ConfigError naming the flag of a value that cannot be."""
    if load.text_tokens < 1 or load.output_tokens < 1:
        raise ConfigError("--text-tokens and --output-tokens must be at least 1")
    if not 0 <= load.reuse <= 0.95:
        raise ConfigError(f"--image-reuse {load.reuse:g} must be between 0 and 0.95")
    if not (0 <= load.text_spread <= 1 and 0 <= load.output_spread <= 1):
        raise ConfigError("--text-spread and --output-spread must be between 0 and 1")
    counts = [count for count, _ in load.images]
    if not counts or min(counts) < 0 or sum(weight for _, weight in load.images) <= 0:
        raise ConfigError("--images needs counts of 0 and above with positive weights, like 0:0.8,1:0.2")
    if min((*(min(w, h) for w, h, _ in load.sizes), 8192)) < 1 or not load.sizes:
        raise ConfigError("--image-size needs sides of 1 and above, like 640x640")


def plan_requests(load: Workload, count: int, seed: int) -> list[PlannedRequest]:
    """`count` requests; the first ones of a longer plan are the same."""
    rng = random.Random(f"requests-{seed}")
    shown: dict[Picture, None] = {}
    planned = []
    for index in range(count):
        pictures = _pictures(load, rng, list(shown), seed)
        shown.update(dict.fromkeys(pictures))
        planned.append(
            PlannedRequest(
                seed=(seed * 1_000_003 + index) % _SEED_SPACE,
                text_tokens=_drawn(rng, load.text_tokens, load.text_spread),
                output_tokens=_drawn(rng, load.output_tokens, load.output_spread),
                pictures=pictures,
            )
        )
    return planned


def _pictures(load: Workload, rng: random.Random, shown: Sequence[Picture], seed: int) -> tuple[Picture, ...]:
    count = rng.choices([c for c, _ in load.images], [weight for _, weight in load.images])[0]
    found: list[Picture] = []
    for _ in range(count):
        if shown and rng.random() < load.reuse:
            found.append(rng.choice(shown))
            continue
        width, height, _ = rng.choices(load.sizes, [weight for *_, weight in load.sizes])[0]
        made = Picture((seed * 7_919 + rng.getrandbits(40)) % _SEED_SPACE, width, height, load.content)
        found.append(made)
    return tuple(found)


def _drawn(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * (1 + spread * rng.uniform(-1, 1))))


def parse_images(text: str) -> tuple[tuple[int, float], ...]:
    """ "2" or "0:0.8,1:0.2": pictures in a request, with weights."""
    try:
        pairs = [word.partition(":") for word in text.split(",")]
        return tuple((int(count), float(weight or 1)) for count, _, weight in pairs)
    except ValueError:
        raise ConfigError(f"--images {text!r}: write a number, or weights like 0:0.8,1:0.2") from None


def parse_sizes(text: str) -> tuple[tuple[int, int, float], ...]:
    """ "640x640" or "320x320:0.7,1280x720:0.3": width x height, with weights."""
    try:
        found = []
        for word in text.split(","):
            size, _, weight = word.partition(":")
            width, _, height = size.partition("x")
            found.append((int(width), int(height or width), float(weight or 1)))
        return tuple(found)
    except ValueError:
        raise ConfigError(f"--image-size {text!r}: write 640x640, or 320x320:0.7,1280x720:0.3") from None
