"""Requests in the shape of Azure's LMM inference trace of October 2024, and the reader of its CSV.

The trace: https://github.com/Azure/AzurePublicDataset (AzureLMMInferenceDataset2025.md), CC-BY, of Qiu et
al., "ModServe: Modality- and Stage-Aware Resource Disaggregation for Scalable Multimodal Model Serving",
SoCC 2025. The shares below are read off the figures of its notebook, to about two percent; the file itself is
not here.
"""

from __future__ import annotations

import csv
import datetime
from pathlib import Path

from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.workload import Picture, PlannedRequest, Workload

#: (pictures of a request, share): half of the requests have none; those with squares look like tiles.
IMAGES = (
    *((0, 0.5), (1, 0.33), (4, 0.0235), (9, 0.075), (16, 0.0095), (25, 0.0235), (49, 0.005), (100, 0.0065)),
    *((196, 0.0045), (289, 0.005), (441, 0.005), (484, 0.004), (529, 0.0085)),
)
#: (share of requests below, tokens). The text requests' input; both kinds' output together.
TEXT_TOKENS = (
    *((0.0, 30), (0.02, 110), (0.1, 175), (0.2, 320), (0.3, 480), (0.4, 660), (0.5, 800), (0.6, 980)),
    *((0.7, 1350), (0.8, 1900), (0.9, 3000), (0.95, 4300), (0.99, 11_000), (1.0, 32_000)),
)
OUTPUT_TOKENS = (
    *((0.03, 1), (0.1, 10), (0.2, 23), (0.3, 43), (0.4, 68), (0.5, 105), (0.6, 165), (0.7, 200)),
    *((0.8, 250), (0.9, 450), (0.95, 620), (0.99, 1100), (1.0, 3000)),
)
#: Pictures of a request of several have about 68 input tokens each: 256 pixels a side for Qwen3-VL.
TILE = 256
SINGLE = 768
TILE_TOKENS, SINGLE_TOKENS = 64, 576

_NUMBERS = ("NumImages", "ContextTokens", "GeneratedTokens")


def lmm_workload(max_images: int = 529) -> Workload:
    """The trace's requests; those with more than `max_images` pictures have `max_images`."""
    shares: dict[int, float] = {}
    for count, share in IMAGES:
        shares[min(count, max_images)] = shares.get(min(count, max_images), 0.0) + share
    return Workload(
        text_tokens=1470,
        output_tokens=186,
        images=tuple(shares.items()),
        sizes=((TILE, TILE, 0.95), (SINGLE, SINGLE, 0.05)),
        text_quantiles=TEXT_TOKENS,
        output_quantiles=OUTPUT_TOKENS,
        content="waves",
    )


def read_azure_csv(path: Path, speed: float = 1.0, seed: int = 0) -> list[tuple[float, PlannedRequest]]:
    """Times in seconds and requests of the file that Azure publishes, or of a part of it with its first line.

    No two pictures are the same: the trace does not tell. Tokens of pictures are taken off the input's.
    ConfigError names the line.
    """
    result: list[tuple[float, PlannedRequest]] = []
    start: datetime.datetime | None = None
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            moment = datetime.datetime.fromisoformat(row["TIMESTAMP"])
            images, tokens, output = (int(row[name]) for name in _NUMBERS)
            start = start or moment
            seconds = (moment - start).total_seconds() / speed
        except (KeyError, TypeError, ValueError) as error:
            columns = ",".join(("TIMESTAMP", *_NUMBERS))
            raise ConfigError(f"--trace {path} line {number}: {error}; its columns are {columns}") from None
        result.append((seconds, _request(seed * 1_000_003 + number, images, tokens, output)))
    if not result:
        raise ConfigError(f"--trace {path} holds no request")
    return sorted(result, key=lambda pair: pair[0])


def _request(seed: int, images: int, tokens: int, output: int) -> PlannedRequest:
    side, each = (SINGLE, SINGLE_TOKENS) if images == 1 else (TILE, TILE_TOKENS)
    pictures = tuple(Picture(seed << 14 | index, side, side, "waves") for index in range(images))
    return PlannedRequest(seed, max(tokens - images * each, 1), max(output, 1), pictures)
