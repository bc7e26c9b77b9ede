"""A stage's time beside the least that the machine could take for it, and what the machine can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Stage:
    """`seconds` as measured; `least` by what is limited: "reading", "copying" or "matrix product"."""

    name: str
    seconds: float
    least: float | None = None
    limited_by: str = ""

    @property
    def share(self) -> float | None:
        """Of the limit that is reached: 1 is all that the machine can do."""
        return None if self.least is None else self.least / self.seconds

    def row(self) -> list[str]:
        least = "–" if self.least is None else f"{self.least * 1e3:.3g}"
        share = "–" if self.share is None else f"{self.share:.0%}"
        return [self.name, f"{self.seconds * 1e3:.3g}", least, share, self.limited_by or "–"]


#: Larger than any cache, and split as the weights of a layer are.
_READ_BYTES = 512 << 20
_CHUNK_ELEMENTS = 4 << 20
#: Rows, inner and outer size of the product: 512 tokens through a layer of `small`.
_SHAPE = (512, 1024, 3072)


@dataclass(frozen=True, slots=True)
class Limits:
    """`read` and `copy` in bytes per second, `product` in multiply-adds times two per second."""

    read: float
    copy: float
    product: float


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Of `repeats` calls after one that does not count."""
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def limits(dtype: torch.dtype, repeats: int = 9) -> Limits:
    """With torch's present number of threads. Reading is measured by the products of single rows."""
    bytes_each = torch.empty(0, dtype=dtype).element_size()
    wide = _CHUNK_ELEMENTS // 1024
    weights = [
        torch.ones(wide, 1024, dtype=dtype) for _ in range(_READ_BYTES // (_CHUNK_ELEMENTS * bytes_each))
    ]
    row = torch.ones(1024, dtype=dtype)
    source, target = torch.ones(_READ_BYTES // 8), torch.empty(_READ_BYTES // 8)
    rows, inner, outer = _SHAPE
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    with torch.inference_mode():
        # Two ways to read everything once: the faster one is the limit.
        by_product = median_seconds(lambda: [weight.mv(row) for weight in weights], repeats)
        plain = [weight.view(torch.int32 if bytes_each == 4 else torch.int16) for weight in weights]
        by_maximum = median_seconds(lambda: [weight.amax() for weight in plain], repeats)
        copied = median_seconds(lambda: target.copy_(source), repeats)
        product = median_seconds(lambda: torch.nn.functional.linear(left, right), 5 * repeats)
    size = len(weights) * _CHUNK_ELEMENTS * bytes_each
    return Limits(
        size / min(by_product, by_maximum), source.nbytes / copied, 2.0 * rows * inner * outer / product
    )
