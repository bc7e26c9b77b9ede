"""Workloads: what requests are made of, and when they are sent. Planning is decided by the seed alone."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from triptych.base.errors import ConfigError

#: Pictures of different windows and seeds never meet: a cache must not answer for them.
_SEED_SPACE = 1 << 48

#: Rising (share of requests below, tokens).
Quantiles = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """`images`: (pictures in a request, weight); `sizes`: (width, height, weight), drawn for every picture.

    `reuse` is the chance that a picture is one that an earlier request has already shown. Lengths are in
    tokens and drawn uniformly from ± their spread (0 to 1), or from quantiles where there are some, of which
    `text_tokens` and `output_tokens` are then the means.
    """

    text_tokens: int = 32
    output_tokens: int = 64
    images: tuple[tuple[int, float], ...] = ((0, 1.0),)
    sizes: tuple[tuple[int, int, float], ...] = ((320, 320, 1.0),)
    reuse: float = 0.0
    text_spread: float = 0.0
    output_spread: float = 0.0
    content: str = "noise"
    text_quantiles: Quantiles = ()
    output_quantiles: Quantiles = ()


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
                text_tokens=_drawn(rng, load.text_tokens, load.text_spread, load.text_quantiles),
                output_tokens=_drawn(rng, load.output_tokens, load.output_spread, load.output_quantiles),
                pictures=pictures,
            )
        )
    return planned


def _pictures(load: Workload, rng: random.Random, shown: Sequence[Picture], seed: int) -> tuple[Picture, ...]:
    count = rng.choices([c for c, _ in load.images], [weight for _, weight in load.images])[0]
    result: list[Picture] = []
    for _ in range(count):
        if shown and rng.random() < load.reuse:
            result.append(rng.choice(shown))
            continue
        width, height, _ = rng.choices(load.sizes, [weight for *_, weight in load.sizes])[0]
        made = Picture((seed * 7_919 + rng.getrandbits(40)) % _SEED_SPACE, width, height, load.content)
        result.append(made)
    return tuple(result)


def _drawn(rng: random.Random, mean: int, spread: float, quantiles: Quantiles) -> int:
    if quantiles:
        return at_share(quantiles, rng.random())
    return max(1, round(mean * (1 + spread * rng.uniform(-1, 1))))


def at_share(quantiles: Quantiles, share: float) -> int:
    """The tokens below which `share` of the requests lie: between two quantiles by logarithm."""
    low_share, low = quantiles[0]
    for high_share, high in quantiles:
        if share < high_share:
            part = (share - low_share) / (high_share - low_share) if share > low_share else 0.0
            return max(1, round(low * math.pow(high / low, part)))
        low_share, low = high_share, high
    return low


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
        result = []
        for word in text.split(","):
            size, _, weight = word.partition(":")
            width, _, height = size.partition("x")
            result.append((int(width), int(height or width), float(weight or 1)))
        return tuple(result)
    except ValueError:
        raise ConfigError(f"--image-size {text!r}: write 640x640, or 320x320:0.7,1280x720:0.3") from None


Side = Annotated[int, msgspec.Meta(ge=1, le=16384)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Image(msgspec.Struct):
    id: str
    width: Side
    height: Side


class _Line(msgspec.Struct):
    time: Annotated[float, msgspec.Meta(ge=0)]
    text_tokens: Count
    output_tokens: Count
    images: list[_Image] = []


def read_trace(path: Path, speed: float = 1.0, seed: int = 0) -> list[tuple[float, PlannedRequest]]:
    """Times and requests of a recorded load, by time: one JSON object a line.

        {"time": 0.25, "text_tokens": 400, "output_tokens": 150,
         "images": [{"id": "a", "width": 640, "height": 480}]}

    `time` is in seconds from the start; pictures with one id are the same picture; `images` may be missing.
    `speed` 2 replays twice as fast. ConfigError names the line.
    """
    decoder = msgspec.json.Decoder(_Line)
    result = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--trace {path} line {number}: {error}") from error
        result.append((entry.time / speed, _planned(entry, number, seed)))
    if not result:
        raise ConfigError(f"--trace {path} holds no request")
    return sorted(result, key=lambda pair: pair[0])


def _planned(entry: _Line, number: int, seed: int) -> PlannedRequest:
    pictures = tuple(Picture(_seed_of(image.id, seed), image.width, image.height) for image in entry.images)
    return PlannedRequest(seed * 1_000_003 + number, entry.text_tokens, entry.output_tokens, pictures)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


KINDS = ("poisson", "gamma", "constant", "ramp")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` in requests per second; `burstiness` of gamma: below 1 burstier than Poisson, above 1 calmer.

    A ramp goes from `rate` to `ramp_to` evenly over the window.
    """

    kind: str = "poisson"
    rate: float = 1.0
    burstiness: float = 1.0
    ramp_to: float = 0.0


def check_arrivals(arrivals: Arrivals) -> None:
    """ConfigError naming the flag of a value that cannot be."""
    if arrivals.kind not in KINDS:
        raise ConfigError(f"--arrivals {arrivals.kind!r} is not known: use one of {', '.join(KINDS)}")
    if not 0 < arrivals.rate < math.inf:
        raise ConfigError(f"--rate {arrivals.rate:g} must be above 0")
    if not 0 < arrivals.burstiness < math.inf:
        raise ConfigError(f"--burstiness {arrivals.burstiness:g} must be above 0")
    if arrivals.kind == "ramp" and not 0 < arrivals.ramp_to < math.inf:
        raise ConfigError("--arrivals ramp needs --ramp-to with a rate above 0")


def mean_rate(arrivals: Arrivals) -> float:
    return (arrivals.rate + arrivals.ramp_to) / 2 if arrivals.kind == "ramp" else arrivals.rate


def arrival_times(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """`count` ascending times. Random gaps are scaled so that the last is exactly at count / rate.

    Short windows would else offer another rate than they say; `vllm bench serve` does the same.
    """
    rng = random.Random(f"arrivals-{seed}")
    if arrivals.kind == "ramp":
        return _ramp(arrivals, count, rng)
    shape = arrivals.burstiness if arrivals.kind == "gamma" else 1.0
    constant = arrivals.kind == "constant"
    gaps = [1.0 if constant else rng.gammavariate(shape, 1.0) for _ in range(count)]
    return _scaled(gaps, count / arrivals.rate)


def _scaled(gaps: Sequence[float], end: float) -> list[float]:
    total, at, times = sum(gaps), 0.0, []
    for gap in gaps:
        at += gap
        times.append(at / total * end)
    return times


def _ramp(arrivals: Arrivals, count: int, rng: random.Random) -> list[float]:
    """Poisson at unit rate, taken back through the rate's integral a·t + (b−a)·t²/2T."""
    span = count / mean_rate(arrivals)
    curve = (arrivals.ramp_to - arrivals.rate) / span
    unit = _scaled([rng.expovariate(1.0) for _ in range(count)], count)
    return [_inverse(arrivals.rate, curve, seen) for seen in unit]


def _inverse(rate: float, curve: float, seen: float) -> float:
    """t with rate·t + curve·t²/2 = seen, in the form that stays exact when the curve is flat."""
    return 2 * seen / (rate + math.sqrt(max(rate * rate + 2 * curve * seen, 0.0)))
