"""CPU time of the adapter for any class beside a family's override: decode step, tower batch, admission.

    python -m benchmarks adapter MODEL... [--batch 8] [--pictures 4] [--tokens 12] [--rounds 8] [--write]

Per MODEL (of Qwen3-VL, Qwen2.5-VL or LLaVA) three ways in one run, in turns forwards and backwards: the
adapter, the override as it is loaded, and the override with fused layers and packed weights, as a worker has
it. One thread, float32, medians; ratios are medians of those of each round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.micro.engine_rounds import engine_round, make_engine, make_requests
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.base.config import MIB
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.models.base import PreparedItem
from triptych.models.generic import DECODER, ENCODER
from triptych.models.generic.layout import ItemLayout
from triptych.models.images import ImageProcessor
from triptych.models.registry import family_of, load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

RESULT = RESULTS / "adapter.md"
WAYS = ("adapter", "override", "fused")
_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_PROMPT = 96
_SIZES = ((160, 128), (96, 200), (224, 64), (128, 128))
#: Milliseconds that one call took, of each way.
Works = Mapping[str, Callable[[], float]]


def timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def medians(works: Works, rounds: int) -> tuple[list[float], list[float]]:
    """Of each way, and of its ratio to the first in the same round; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            taken = works[name]()
            times[name] += [taken] if turn else []
    first, *others = times.values()
    paired = [[one / other for one, other in zip(first, each, strict=True)] for each in others]
    return [statistics.median(each) for each in times.values()], [statistics.median(each) for each in paired]


def for_adapter(path: Path, image: Image.Image, item: PreparedItem) -> PreparedItem:
    """The item with the tensors of the checkpoint's own processor, as the class takes them."""
    tensors = {name: x for name, x in ImageProcessor(path)(image, {}).items() if torch.is_tensor(x)}
    return PreparedItem(item.rows, item.length, item.grid_thw, item.cost, tensors)


def admissions(sides: Mapping[str, Any], item: PreparedItem) -> Works:
    """The inputs of a prompt of text, one picture and text."""
    image, rows = sides["fused"].image_token_id, item.rows
    width = len(sides["adapter"].capture.type_names)
    grids = {0: torch.tensor([item.grid_thw])} if item.grid_thw else {}
    layout = ItemLayout((image,) * rows, ((1,) * width,) * rows, grids).encode()
    plan = ItemPlan("0" * 64, "n", "image", rows, 8, "float32", rows, None, item.grid_thw)
    ids = [5] * (_PROMPT // 2) + [image] * rows + [6] * (_PROMPT // 2)
    # An override's encoder sends none: a grid says it all.
    plans = {name: replace(plan, layout=layout if name == "adapter" else ()) for name in sides}
    features = {name: [MMFeature(each, Placement(_PROMPT // 2, rows))] for name, each in plans.items()}
    return {
        name: partial(timed, partial(side.prompt_inputs, ids, features[name])) for name, side in sides.items()
    }


def decode_steps(path: Path, sides: Mapping[str, Any], options: argparse.Namespace) -> Works:
    prompts = [[7 + number] * _PROMPT for number in range(options.batch)]

    def step(side: Any, engine: Any) -> float:
        requests = make_requests(engine, prompts, options.tokens, side.geometry.position_rows)
        speed = engine_round(engine, requests).tokens_per_cpu_second
        return 1e3 * float(options.batch) / speed

    flags: dict[str, Any] = {"max_model_len": 512, "kv_memory": 256 * MIB}
    engines = {name: make_engine(path, "cpu", torch.float32, side, **flags) for name, side in sides.items()}
    return {name: partial(step, side, engines[name]) for name, side in sides.items()}


def measure(path: Path, options: argparse.Namespace) -> list[tuple[str, tuple[list[float], list[float]]]]:
    decoders: tuple[Any, ...] = (DECODER.load, family_of(path).decoder.load, load_decoder)
    encoders: tuple[Any, ...] = (ENCODER.without_processor, family_of(path).encoder.load, load_encoder)
    sides = {
        n: load(path, **_CPU, attn_implementation=ATTENTION_NAME)
        for n, load in zip(WAYS, decoders, strict=True)
    }
    towers = {name: load(path, **_CPU) for name, load in zip(WAYS, encoders, strict=True)}
    noise = np.random.default_rng(0)
    shapes = [(*_SIZES[number % len(_SIZES)], 3) for number in range(options.pictures)]
    images = [Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]
    items = [towers["fused"].preprocess(image, {}) for image in images]
    given = dict.fromkeys(WAYS, items)
    given["adapter"] = [for_adapter(path, *pair) for pair in zip(images, items, strict=True)]
    batches = {name: partial(timed, partial(tower.encode, given[name])) for name, tower in towers.items()}
    with torch.inference_mode():
        return [
            ("decode step", medians(decode_steps(path, sides, options), options.rounds)),
            ("tower batch", medians(batches, options.rounds)),
            ("admission of a prompt", medians(admissions(sides, items[0]), 10 * options.rounds)),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="+")
    for name, default in (("batch", 8), ("pictures", 4), ("tokens", 12), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in options.models:
        for what, (times, ratios) in measure(path, options):
            shown = [
                f"{ratio:.2f}" if time > 0.005 else "" for ratio, time in zip(ratios, times[1:], strict=True)
            ]
            rows.append(f"| {' | '.join((path.name, what, *(f'{each:.2f}' for each in times), *shown))} |")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    page = fill("adapter", **vars(options) | versions | {"prompt": _PROMPT, "rows": "\n".join(rows)})
    publish(page, RESULT, write=options.write)


if __name__ == "__main__":
    main()
