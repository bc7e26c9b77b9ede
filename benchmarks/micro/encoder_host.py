"""CPU time of an encoder worker's host work for one picture, beside transformers' own steps, one thread."""

from __future__ import annotations

import argparse
import io
import math
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import PIL
import torch
import transformers
import xxhash
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.micro.encoder_worker_path import DTYPE, SETTINGS, SIZE, WIDTH, whole_path
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.ec_connector.connectors.host_buffers import bytes_of
from triptych.encoder_worker.media.formats import decode_image
from triptych.kernels.functions import copy_checked
from triptych.models.images import PatchRecipe

RESULT = RESULTS / "encoder_host.md"
_PICTURES = ((1920, 1080, "JPEG"), (1920, 1080, "PNG"), (448, 448, "JPEG"))
_ROUND_PICTURES = 8
_CPU = torch.device("cpu")


def photo(width: int, height: int, kind: str) -> bytes:
    """A file of a smooth picture with a sensor's noise."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = 127 + 90 * np.sin(rows / 97 + np.arange(3)[:, None, None]) * np.cos(columns / 83)
    pixels = (waves + np.random.default_rng(0).normal(0, 4, waves.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, kind, quality=90)
    return file.getvalue()


class HostWork:
    """The steps around the tower for one file, in both ways."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.processor = Qwen2VLImageProcessorPil(size=SIZE, **SETTINGS)
        recipe = PatchRecipe.of(self.processor)
        assert recipe is not None
        self.recipe = recipe
        self.picture = decode_image(data, max_pixels=1 << 26)
        self.levels, grid = recipe.levels(self.picture)
        self.rows = torch.randn(math.prod(grid) // 4, WIDTH).to(DTYPE)
        self.segment = np.zeros(self.rows.nbytes, np.uint8)  # as one of shared memory that is used again

    def steps(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """By name: transformers' way (or torch's plain one), and ours."""
        pixels = self.processor(images=[self.picture], return_tensors="pt")["pixel_values"]
        return {
            "decode": (
                lambda: Image.open(io.BytesIO(self.data)).convert("RGB"),
                lambda: decode_image(self.data, max_pixels=1 << 26),
            ),
            "resize, normalise, patches": (
                lambda: self.processor(images=[self.picture], return_tensors="pt"),
                lambda: self.recipe.levels(self.picture),
            ),
            "the tower's input, bf16": (
                lambda: torch.cat([pixels]).to(DTYPE),
                lambda: self.recipe.values(torch.cat([self.levels]), _CPU, DTYPE),
            ),
            "the rows' copy, checksum, check": (self._three_passes, self._one_pass),
        }

    def _three_passes(self) -> object:
        copy = self.rows.clone()
        return xxhash.xxh3_128_digest(bytes_of(copy)), math.isfinite(float(copy.sum(dtype=torch.float32)))

    def _one_pass(self) -> object:
        source = np.frombuffer(bytes_of(self.rows), np.uint8)
        return copy_checked(source, self.segment[: len(source)], "bfloat16", xxhash.xxh3_128().update)


def cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def measure(data: bytes, repeats: int) -> list[tuple[str, float, float]]:
    """Median CPU milliseconds of every step in both ways, interleaved."""
    steps = HostWork(data).steps()
    times: dict[str, list[tuple[float, float]]] = {step: [] for step in steps}
    for turn in range(repeats + 1):
        for step, (theirs, ours) in steps.items():
            pair = cpu_ms(theirs), cpu_ms(ours)
            if turn:
                times[step].append(pair)
    medians = {
        step: [statistics.median(way) for way in zip(*pairs, strict=True)] for step, pairs in times.items()
    }
    return [(step, theirs, ours) for step, (theirs, ours) in medians.items()]


def table(width: int, height: int, kind: str, repeats: int) -> str:
    name = f"{width}x{height} {kind}"
    rows = measure(photo(width, height, kind), repeats)
    rows.append(("**sum**", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    lines = "\n".join(f"| {step} | {a:.1f} | {b:.1f} | {a / b:.1f} |" for step, a, b in rows)
    return f"## {name}\n\n| step, CPU ms | transformers | ours | ratio |\n|---|---|---|---|\n{lines}\n"


def worker_table(repeats: int) -> str:
    """The whole path of a worker, each way in a process of its own."""
    ways = whole_path(photo(*_PICTURES[0]), repeats, _ROUND_PICTURES)
    (_, base), *_ = ways.values()
    lines = (f"| {way} | {rate:.1f} | {cpu:.0f} | {base / cpu:.1f} |" for way, (rate, cpu) in ways.items())
    head = "| prepared by | pictures/s | CPU ms per picture | ratio |\n|---|---|---|---|"
    return "\n".join((head, *lines)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=6, help="of 8 pictures through a worker; 0: none")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = "\n".join(table(*picture, options.repeats) for picture in _PICTURES)
    page = fill(
        "encoder_host",
        command=f"python -m benchmarks encoder_host --repeats {options.repeats} --rounds {options.rounds}",
        torch=torch.__version__,
        transformers=transformers.__version__,
        pillow=PIL.__version__,
        tables=tables,
        worker=worker_table(options.rounds) if options.rounds else "Not run.\n",
    )
    publish(page, RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
