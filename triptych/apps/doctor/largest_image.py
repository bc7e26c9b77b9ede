"""The largest image that a model and its limits take, by its image processor's settings. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from triptych.apps.doctor.finding import CheckResult, fail, note, ok


def largest_image(processor: Mapping[str, Any], limits: Mapping[str, int]) -> CheckResult:
    """`limits`: the most rows of an image, by the flag that sets them, like "--max-model-len 4096"."""
    size = processor["size"]
    if "merge_size" not in processor:
        target = processor.get("crop_size") or size
        return ok("largest image", f"any: it is scaled to {target['width']}x{target['height']} pixels")
    # A row is a square of this side, and an image whole rows of them.
    side = int(processor["patch_size"]) * int(processor["merge_size"])
    own = int(size["longest_edge"]) // side**2
    flag, rows = min(limits.items(), key=lambda limit: limit[1])
    if own <= rows:
        return ok("largest image", f"{_shown(own, side)}; larger ones are scaled down to it")
    if rows < 1:
        return fail("largest image", f"none fits into {flag}", f"raise {flag.partition(' ')[0]}")
    shown = f"{_shown(rows, side)} by {flag}; the model's own limit is {_shown(own, side)}"
    remedy = f"raise {flag.partition(' ')[0]}, or ask for max_pixels {rows * side**2} in mm_processor_kwargs"
    return note("largest image", shown, remedy)


def _shown(rows: int, side: int) -> str:
    edge = math.isqrt(rows) * side
    return f"{edge}x{edge} pixels ({rows} rows)"
