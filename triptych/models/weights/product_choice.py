"""Which product is faster on this chip, ours or oneDNN's: measured once, then read from a file.

One file per chip, build, threads and shapes, shared by all workers of a host. Both products are right: a file
that is lost, unreadable or made up costs time alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from triptych.base.progress import Progress
from triptych.kernels.library import cache_folder, library_name
from triptych.models.weights.prepack import ROWS, PrepackedLinear

logger = logging.getLogger(__name__)

#: Values of --linear-kernel.
AUTO, OURS, ONEDNN = LINEAR_KERNELS = ("auto", "triptych", "onednn")
#: By the name of a shape: those of ROWS that our kernel multiplies.
Choice = Mapping[str, tuple[int, ...]]
#: Weights that a measurement goes through, so that they come from memory, as in a step.
_BYTES = 32 << 20
_TIMES = 3
#: Our call has the norm and the sum or SiLU in it too, which is worth about a tenth (docs/performance.md).
_CLEARLY = 0.9
_MAX_FILE = 1 << 20


@torch.no_grad()
def choose_products(module: nn.Module, kernel: str = AUTO) -> None:
    """Has each prepacked layer multiply by the faster product, or by the one that `kernel` names.

    With the threads that torch has now.
    """
    layers: dict[str, list[PrepackedLinear]] = {}
    for layer in {id(part): part for part in module.modules() if isinstance(part, PrepackedLinear)}.values():
        if layer.block:
            layers.setdefault(_shape(layer), []).append(layer)
    if not layers:
        return
    if kernel == AUTO:
        chosen = _kept_or_measured(layers)
    else:
        chosen = dict.fromkeys(layers, ROWS if kernel == OURS else ())
    for shape, alike in layers.items():
        for layer in alike:
            layer.choose(chosen[shape])


def _kept_or_measured(layers: Mapping[str, Sequence[PrepackedLinear]]) -> Choice:
    file = cache_folder() / f"linear-{_digest(layers)}.json"
    kept = _read(file)
    chosen = None if kept is None else parse_choice(kept, layers)
    if chosen is not None:
        return chosen
    with Progress("measuring products of few rows"):
        chosen = {
            shape: faster({rows: _times(alike, rows) for rows in alike[0].known})
            for shape, alike in layers.items()
        }
    _write(file, json.dumps(chosen))
    return chosen


def faster(seconds: Mapping[int, tuple[float, float]]) -> tuple[int, ...]:
    """The numbers of rows whose second time, oneDNN's, is not clearly below their first, ours."""
    return tuple(rows for rows, (ours, theirs) in seconds.items() if ours * _CLEARLY <= theirs)


def parse_choice(text: str, shapes: Mapping[str, object]) -> Choice | None:
    """A file's choice for exactly these shapes; None for anything else that a file may hold."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != shapes.keys():
        return None
    for rows in found.values():
        if not isinstance(rows, list) or not all(type(count) is int and count in ROWS for count in rows):
            return None
    return {shape: tuple(rows) for shape, rows in found.items()}


def _times(layers: Sequence[PrepackedLinear], rows: int) -> tuple[float, float]:
    """Seconds of our product and of oneDNN's through layers of one shape, in turn; of each layer the least.

    Other work on the cores lengthens some calls, and seldom all three of a layer.
    """
    first = layers[0]
    each = first.in_features * first.out_features * first.weight.dtype.itemsize
    some = layers[: max(1, _BYTES // each)]
    x = torch.ones(rows, first.in_features, dtype=first.weight.dtype)
    best = {kernel: [math.inf] * len(some) for kernel in ((rows,), ())}
    for kernel in (*best,) * _TIMES:
        for at, layer in enumerate(some):
            layer.choose(kernel)
            start = time.perf_counter()
            layer.multiply(x)
            best[kernel][at] = min(best[kernel][at], time.perf_counter() - start)
    return sum(best[rows,]), sum(best[()])


def _shape(layer: PrepackedLinear) -> str:
    kind = str(layer.weight.dtype).removeprefix("torch.")
    return f"{layer.out_features}x{layer.in_features} of {kind} in {layer.block}"


def _digest(shapes: Mapping[str, object]) -> str:
    """Of all that decides which is faster."""
    limit, threads = os.environ.get("ONEDNN_MAX_CPU_ISA", ""), torch.get_num_threads()
    known = (chip(), torch.__version__, library_name(), limit, threads, sorted(shapes))
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def chip(path: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself, with the numbers that tell its generation."""
    names = ("model name", "cpu family", "model\t", "stepping", "flags")
    try:
        lines = path.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return platform.machine() + "".join(line for line in lines if line.startswith(names))


def _read(file: Path) -> str | None:
    try:
        if not file.is_file() or file.stat().st_size > _MAX_FILE:
            return None
        return file.read_text()
    except (OSError, ValueError):
        return None


def _write(file: Path, text: str) -> None:
    """The file is there whole or not at all; without it, the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            written = Path(scratch) / file.name
            written.write_text(text)
            written.replace(file)
    except OSError as error:
        logger.info("the choice of products is not kept, so that each start measures: %s", error)
