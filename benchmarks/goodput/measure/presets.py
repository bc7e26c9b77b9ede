"""Named workloads with the rates and objectives they are usually run with.

`short-N` and `long-N` are the published random-mm matrix of vLLM's encoder disaggregation: 400 or 2000 text
tokens, N pictures of 640x640, 150 output tokens, 4 to 24 requests per second. `small-…` are their twins with
a quarter of every length (pictures: a quarter of the area), for machines without accelerators. The rest
mix and repeat.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.errors import ConfigError
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.slo import Slo

_PUBLISHED_SLO = Slo((("ttft", 20_000.0), ("tpot", 100.0)))
_TIGHT_SLO = Slo((("ttft", 1_000.0), ("tpot", 100.0)))
_LOCAL = Workload(text_tokens=32, output_tokens=64, sizes=((320, 320, 1.0),))


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload, the rates to sweep in requests per second, and its objectives."""

    workload: Workload
    rates: tuple[float, ...]
    slo: Slo


def _matrix() -> dict[str, Preset]:
    found = {}
    for name, tokens in (("short", 400), ("long", 2000)):
        for images in (1, 2, 3, 4):
            load = Workload(tokens, 150, ((images, 1.0),), ((640, 640, 1.0),))
            found[f"{name}-{images}"] = Preset(load, (4, 8, 12, 16, 20, 24), _PUBLISHED_SLO)
            twin = replace(load, text_tokens=tokens // 4, output_tokens=38, sizes=((320, 320, 1.0),))
            found[f"small-{name}-{images}"] = Preset(twin, (1, 2, 4, 6), _TIGHT_SLO)
    return found


def _local(rates: tuple[float, ...] = (1, 2, 4, 6), **changes: object) -> Preset:
    return Preset(replace(_LOCAL, **changes), rates, _TIGHT_SLO)  # type: ignore[arg-type]


PRESETS: dict[str, Preset] = {
    "text": _local((2, 4, 8, 16)),
    "image": _local(images=((1, 1.0),)),
    "images-4": _local((0.5, 1, 2, 4), images=((4, 1.0),)),
    "mix": _local(images=((0, 0.8), (1, 0.2))),
    "reuse-50": _local(images=((1, 1.0),), reuse=0.5),
    "reuse-90": _local(images=((1, 1.0),), reuse=0.9),
    **_matrix(),
}


def preset(name: str) -> Preset:
    """ConfigError naming the presets there are."""
    if name not in PRESETS:
        raise ConfigError(f"--workload {name!r} is not known: use one of {', '.join(PRESETS)}")
    return PRESETS[name]
