"""Service level objectives, as `vllm bench serve --goodput` writes them: `ttft:500 tpot:50 e2el:8000`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.azure_lmm import OUTPUT_TOKENS, TEXT_TOKENS, lmm_workload
from triptych_bench.goodput.load.workload import Quantiles, Workload

#: Time to first token, time per output token after it, end-to-end latency.
METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds by metric; a request is good when it meets all of them."""

    limits: tuple[tuple[str, float], ...] = ()

    def seconds(self, metric: str) -> float:
        """The metric's limit; infinite when it has none."""
        return dict(self.limits).get(metric, math.inf) / 1000

    def __str__(self) -> str:
        return " ".join(f"{name}:{limit:g}" for name, limit in self.limits)

    def misses(self, latencies: Mapping[str, float]) -> tuple[str, ...]:
        """The metrics over their limits. `latencies` are in seconds and hold all of METRICS."""
        return tuple(name for name, limit in self.limits if latencies[name] > limit / 1000)


def parse_slo(words: Iterable[str]) -> Slo:
    """ConfigError for what is no `metric:milliseconds`. Words may hold several, apart by spaces or commas."""
    limits: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, colon, value = word.partition(":")
        if name not in METRICS or not colon:
            raise ConfigError(
                f"--slo {word!r} is no objective: write {', '.join(METRICS)} like ttft:500, in ms"
            )
        if name in limits:
            raise ConfigError(f"--slo names {name} twice")
        limits[name] = _milliseconds(word, value)
    return Slo(tuple(limits.items()))


def _milliseconds(word: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ConfigError(f"--slo {word!r} has no positive number of milliseconds")
    return limit


_PUBLISHED_SLO = Slo((("ttft", 20_000.0), ("tpot", 100.0)))
_TIGHT_SLO = Slo((("ttft", 1_000.0), ("tpot", 100.0)))
#: From a thumbnail's 0.15 to a camera's 8 million pixels.
PHOTO_SIZES = ((448, 336, 0.3), (1024, 768, 0.4), (1920, 1080, 0.25), (3264, 2448, 0.05))
_LOCAL = Workload(text_tokens=32, output_tokens=64, sizes=((320, 320, 1.0),))


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload, the rates to sweep in requests per second, and its objectives."""

    workload: Workload
    rates: tuple[float, ...]
    slo: Slo


def _matrix() -> dict[str, Preset]:
    result = {}
    for name, tokens in (("short", 400), ("long", 2000)):
        for images in (1, 2, 3, 4):
            load = Workload(tokens, 150, ((images, 1.0),), ((640, 640, 1.0),))
            result[f"{name}-{images}"] = Preset(load, (4, 8, 12, 16, 20, 24), _PUBLISHED_SLO)
            twin = replace(load, text_tokens=tokens // 4, output_tokens=38, sizes=((320, 320, 1.0),))
            result[f"small-{name}-{images}"] = Preset(twin, (1, 2, 4, 6), _TIGHT_SLO)
    return result


def _quarter(quantiles: Quantiles) -> Quantiles:
    return tuple((share, max(1, tokens // 4)) for share, tokens in quantiles)


def _local(rates: tuple[float, ...] = (1, 2, 4, 6), **changes: object) -> Preset:
    return Preset(replace(_LOCAL, **changes), rates, _TIGHT_SLO)  # type: ignore[arg-type]


PRESETS: dict[str, Preset] = {
    "text": _local((2, 4, 8, 16)),
    "image": _local(images=((1, 1.0),)),
    "images-4": _local((0.5, 1, 2, 4), images=((4, 1.0),)),
    "mix": _local(images=((0, 0.8), (1, 0.2))),
    "mix-photos": _local(images=((0, 0.8), (1, 0.2)), sizes=((448, 320, 1.0),), content="photos"),
    "reuse-50": _local(images=((1, 1.0),), reuse=0.5),
    "reuse-90": _local(images=((1, 1.0),), reuse=0.9),
    **_matrix(),
    "photos": _local(images=((1, 1.0),), sizes=PHOTO_SIZES, content="photos"),
    "documents": _local(images=((1, 1.0),), sizes=((827, 1169, 1.0),), content="documents"),
    "screenshots": _local(
        images=((1, 0.6), (2, 0.4)), sizes=((1280, 800, 1.0),), reuse=0.5, content="screenshots"
    ),
    "azure-lmm": Preset(lmm_workload(), (1, 2, 4, 8), _PUBLISHED_SLO),
    "small-azure-lmm": Preset(
        replace(
            lmm_workload(9),
            text_tokens=350,
            output_tokens=48,
            text_quantiles=_quarter(TEXT_TOKENS),
            output_quantiles=_quarter(OUTPUT_TOKENS),
        ),
        (0.25, 0.5, 1, 2),
        _TIGHT_SLO,
    ),
}


def preset(name: str) -> Preset:
    """ConfigError naming the presets there are."""
    if name not in PRESETS:
        raise ConfigError(f"--workload {name!r} is not known: use one of {', '.join(PRESETS)}")
    return PRESETS[name]
