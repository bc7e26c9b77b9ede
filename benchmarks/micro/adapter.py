"""CPU time of the adapter for any class beside a family's override: decode step, tower batch, admission.

    python -m benchmarks adapter MODEL... [--batch 8] [--pictures 4] [--tokens 24] [--rounds 7] [--write]

Per MODEL (a checkpoint of Qwen3-VL, Qwen2.5-VL or LLaVA) one interleaved run of three ways: the adapter, the
override as it is loaded, and the override with fused layers and prepacked weights, as a worker has it. One
thread, float32, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.micro.engine_decode import engine_round, make_engine, make_requests
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.base.config import MIB
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.models.generic import DECODER, ENCODER
from triptych.models.generic.layout import ItemLayout
from triptych.models.images import ImageProcessor
from triptych.models.registry import family_of, load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

RESULT = RESULTS / "adapter.md"
WAYS = ("adapter", "override", "fused")
_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_PROMPT = 96
Works = Mapping[str, Callable[[], object]]


def decoders(path: Path) -> dict[str, DecoderSide]:
    options = _CPU | {"attn_implementation": ATTENTION_NAME}
    ways: tuple[Any, ...] = (DECODER.load, family_of(path).decoder.load, load_decoder)
    return {name: way(path, **options) for name, way in zip(WAYS, ways, strict=True)}


def encoders(path: Path) -> dict[str, EncoderSide]:
    ways: tuple[Any, ...] = (ENCODER.without_processor, family_of(path).encoder.load, load_encoder)
    return {name: way(path, **_CPU) for name, way in zip(WAYS, ways, strict=True)}


def pictures(count: int) -> list[Image.Image]:
    """Of noise, and of different sizes."""
    noise = np.random.default_rng(0)
    sizes = ((160, 128), (96, 200), (224, 64), (128, 128))
    shapes = [sizes[number % len(sizes)] for number in range(count)]
    return [Image.fromarray(noise.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in shapes]


def for_adapter(path: Path, image: Image.Image, item: PreparedItem) -> PreparedItem:
    """The item with the tensors of the checkpoint's own processor, as the class takes them."""
    tensors = {name: x for name, x in ImageProcessor(path)(image, {}).items() if torch.is_tensor(x)}
    return PreparedItem(item.rows, item.length, item.grid_thw, item.cost, tensors)


def admissions(sides: Mapping[str, DecoderSide], item: PreparedItem) -> Works:
    """The inputs of a prompt of text, one picture and text, for each way."""
    image, rows = sides["fused"].image_token_id, item.rows
    assert image is not None
    width = len(sides["adapter"].capture.type_names)  # type: ignore[attr-defined]
    grids = {0: torch.tensor([item.grid_thw])} if item.grid_thw else {}
    layout = ItemLayout((image,) * rows, ((1,) * width,) * rows, grids).encode()
    plan = ItemPlan("0" * 64, "n", "image", rows, 8, "float32", rows, None, item.grid_thw, layout)
    ids = [5] * (_PROMPT // 2) + [image] * rows + [6] * (_PROMPT // 2)
    features = [MMFeature(plan, Placement(_PROMPT // 2, rows))]
    return {name: partial(side.prompt_inputs, ids, features) for name, side in sides.items()}


def medians(works: Works, rounds: int) -> list[float]:
    """Median CPU milliseconds of each way, interleaved, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            if turn:
                times[name].append((time.process_time() - began) * 1e3)
    return [statistics.median(each) for each in times.values()]


def decode_steps(path: Path, sides: Mapping[str, DecoderSide], options: argparse.Namespace) -> list[float]:
    """Median CPU milliseconds of a decode step of each way."""
    engines = {
        name: make_engine(path, "cpu", torch.float32, side, max_model_len=512, kv_memory=256 * MIB)
        for name, side in sides.items()
    }
    prompts = [[7 + number] * _PROMPT for number in range(options.batch)]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.rounds + 1):
        for name, engine in engines.items():
            rows = sides[name].geometry.position_rows
            speed = engine_round(engine, make_requests(engine, prompts, options.tokens, rows))
            if turn:
                times[name].append(1e3 * options.batch / speed.tokens_per_cpu_second)
    return [statistics.median(each) for each in times.values()]


def measure(path: Path, options: argparse.Namespace) -> list[tuple[str, list[float]]]:
    with torch.inference_mode():
        sides, towers = decoders(path), encoders(path)
        images = pictures(options.pictures)
        items = [towers["fused"].preprocess(image, {}) for image in images]
        given = dict.fromkeys(WAYS, items)
        given["adapter"] = [for_adapter(path, *pair) for pair in zip(images, items, strict=True)]
        works: Works = {name: partial(tower.encode, given[name]) for name, tower in towers.items()}
        return [
            ("decode step", decode_steps(path, sides, options)),
            ("tower batch", medians(works, options.rounds)),
            ("admission of a prompt", medians(admissions(sides, items[0]), 10 * options.rounds)),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    for name, default in (("batch", 8), ("pictures", 4), ("tokens", 24), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in options.models:
        for what, (adapter, override, fused) in measure(path, options):
            ratios = f"{adapter / override:.2f} | {adapter / fused:.2f}"
            rows.append(f"| {path.name} | {what} | {adapter:.2f} | {override:.2f} | {fused:.2f} | {ratios} |")
    page = fill(
        "adapter", batch=options.batch, pictures=options.pictures, prompt=_PROMPT, rows="\n".join(rows),
        torch=torch.__version__, transformers=transformers.__version__,
    )  # fmt: skip
    publish(page, RESULT, write=options.write)


if __name__ == "__main__":
    main()
