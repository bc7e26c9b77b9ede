"""What 8 bits cost: logits against those in fp32 for every family, and the demo model's answers.

    python -m benchmarks int8_quality [--items 8] [--tokens 48] [--answers 360] [--write]

Per family, on the tests' tiny random checkpoint: both sides are loaded in fp32, and with every value of
--quantization. The fp32 model's own greedy tokens over its own encoder rows are put through the others, whole
sequences at once, and every position's logits are compared. A random model's candidates lie close together:
of a trained one more best tokens agree, which the demo model's lines show. `--answers` 0 leaves the demo out;
else its held-out questions are asked through `triptych serve`. One layer is timed, too.
Needs the checkout with its tests, and the `worker` and `embedded` extras.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from benchmarks.result_page import RESULTS, add_write_flag, publish
from examples.demo_models.images.evaluate import cases, evaluate
from examples.demo_models.images.inference import MODEL_ID, Http
from triptych.config import WorkerCounts
from triptych.goodput.launch import launched
from triptych.goodput.report.machine import commit
from triptych.models.registry import FAMILIES, load_decoder, load_encoder
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.quantization import QUANTIZATIONS, Int8Linear, quantize
from triptych.models.weights.w8a8_linear import W8A8Linear

ROOT = Path(__file__).resolve().parents[2]
RESULT = RESULTS / "int8_quality.md"
START_SECONDS = 180.0
#: Inputs and outputs of the layer that is timed.
LAYER = (2048, 4096)


@dataclass(slots=True)
class Difference:
    """One family in 8 bits against itself in fp32."""

    family: str
    quantization: str
    share_of_bytes: float
    rows: float
    largest: float
    mean: float
    agree: float


@dataclass(frozen=True, slots=True)
class Speed:
    """CPU ms of one layer: prepacked, with int8 weights, and with int8 activations, too."""

    dtype: str
    rows: int
    plain: float
    int8: float
    w8a8: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=8, help="pictures, texts or sounds of each family")
    parser.add_argument("--tokens", type=int, default=48, help="greedy tokens of each")
    parser.add_argument("--answers", type=int, default=360, help="questions for the demo model")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    lines = [line for family in FAMILIES for line in compare(family.name, options.items, options.tokens)]
    right = {name: demo(name, options.answers) for name in QUANTIZATIONS} if options.answers else {}
    text = report(lines, right, speeds(), options)
    publish(text, RESULT, write=options.write)


def compare(family: str, items: int, tokens: int) -> list[Difference]:
    """All ways of 8 bits against fp32, over `items` greedy outputs of `tokens` tokens."""
    from support.data.checkpoints import build_checkpoint
    from support.encdec.reference import NAME as CROSS
    from support.engine.reference_attention import NAME as PLAIN

    path = build_checkpoint(family)
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    sides = {}
    for name in QUANTIZATIONS:
        encoder = load_encoder(path, **options, quantization=name)
        decoder = load_decoder(path, **options, attn_implementation=CROSS, quantization=name)
        if decoder.cross is None:
            decoder = load_decoder(path, **options, attn_implementation=PLAIN, quantization=name)
        sides[name] = (encoder, decoder)
    found = {name: Difference(family, name, _share(sides, name), 0, 0, 0, 0) for name in QUANTIZATIONS[1:]}
    count = 0
    for number in range(items):
        media = _media(sides["none"][0], number)
        prepared = {name: encoder.preprocess(media, {}) for name, (encoder, _) in sides.items()}
        rows = {name: sides[name][0].encode([prepared[name]])[0] for name in sides}
        ids, prompt = _greedy(sides["none"], prepared["none"], rows["none"], tokens)
        logits = {
            name: _logits(*sides[name], ids, prepared[name], rows[name])[prompt - 1 : -1] for name in sides
        }
        exact, count = logits["none"], count + tokens
        for name, line in found.items():
            error = (logits[name] - exact).abs()
            spread = float(exact.std())
            line.rows = max(line.rows, float((rows[name] - rows["none"]).abs().max() / rows["none"].std()))
            line.largest = max(line.largest, float(error.max()) / spread)
            line.mean += float(error.mean()) / spread / items
            line.agree += int((logits[name].argmax(-1) == exact.argmax(-1)).sum())
    for line in found.values():
        line.agree /= count
    return list(found.values())


def _share(sides: dict[str, Any], name: str) -> float:
    """Bytes of both sides' parameters, as a share of those in fp32."""
    held = {key: sum(parameter_bytes(side.module) for side in sides[key]) for key in ("none", name)}
    return held[name] / held["none"]


def _media(encoder: Any, number: int) -> Any:
    """A picture, a text or a sound, by its number."""
    from support.data.pictures import picture
    from support.data.sounds import Sound, sound

    if encoder.modality == "audio":
        return Sound(sound(1.0 + 2 * number, seed=number))
    if encoder.modality == "text":
        rng = random.Random(number)
        return " ".join(rng.choices(("import", "os", "self", "value", "name", "while", "open"), k=8)).encode()
    image: Image.Image = picture(number, 48 + 16 * (number % 4), 64)
    return image


def _start(decoder: Any, prepared: Any) -> list[int]:
    """The tokens before the answer: the family's own start, or the picture and a few words."""
    if decoder.cross is not None:
        return list(decoder.prompt_defaults({}).token_ids)
    from support.data.model_prompts import plan_of

    geometry = decoder.geometry
    plan = plan_of(prepared, geometry.hidden_size * (1 + geometry.deepstack_levels))
    return [*decoder.placeholder(plan), 40, 41, 42]


def _logits(encoder: Any, decoder: Any, ids: list[int], prepared: Any, rows: torch.Tensor) -> torch.Tensor:
    if decoder.cross is not None:
        from support.encdec.reference import decoder_logits

        return decoder_logits(decoder, [ids], [rows])[0]
    from support.data.model_prompts import ModelPrompt, batch_logits, plan_of
    from triptych.types import MMFeature, Placement

    feature = MMFeature(plan_of(prepared, encoder.width), Placement(0, prepared.length, prepared.runs))
    return batch_logits(decoder, [ModelPrompt(ids, [feature], [rows])])


def _greedy(sides: tuple[Any, Any], prepared: Any, rows: torch.Tensor, tokens: int) -> tuple[list[int], int]:
    """Prompt and greedy output, and the prompt's length."""
    encoder, decoder = sides
    ids = _start(decoder, prepared)
    prompt = len(ids)
    for _ in range(tokens):
        logits = _logits(encoder, decoder, ids, prepared, rows)[-1]
        if decoder.image_token_id is not None:
            logits[decoder.image_token_id] = float("-inf")
        ids.append(int(logits.argmax()))
    return ids, prompt


def demo(quantization: str, answers: int) -> float:
    """Share of the demo model's held-out questions that are answered with the whole truth."""
    shape = WorkerCounts(encoders=1, pd_workers=1)
    with launched(shape, "", ["--quantization", quantization], START_SECONDS) as cluster:
        marks = evaluate(Http(cluster.url, MODEL_ID), cases(1, answers), controls=False)
    return sum(mark.said == mark.case.truth for mark in marks) / len(marks)


def speeds() -> list[Speed]:
    """One layer on one thread, medians in turns."""
    torch.set_num_threads(1)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        linear = torch.nn.Linear(*LAYER, bias=False, dtype=dtype).requires_grad_(False)
        plain, small = PrepackedLinear(linear), Int8Linear(linear)
        weight, scale = quantize(linear.weight)
        small.load_state_dict({"weight": weight, "scale": scale}, strict=False, assign=True)
        layers = (plain, small, W8A8Linear(small))
        for rows in (1, 4, 16, 256):
            x = torch.randn(rows, LAYER[0]).to(dtype)
            taken: dict[Any, list[float]] = {layer: [] for layer in layers}
            for layer, times in [*taken.items()] * 11:
                began = time.process_time()
                for _ in range(max(1, 16 // rows)):
                    layer(x)
                times.append((time.process_time() - began) * 1e3 / max(1, 16 // rows))
            medians = (statistics.median(taken[layer]) for layer in layers)
            found.append(Speed(str(dtype).removeprefix("torch."), rows, *medians))
    return found


def report(
    lines: list[Difference],
    right: dict[str, float],
    times: list[Speed],
    options: argparse.Namespace,
) -> str:
    """The results as the committed page has them."""
    command = " ".join(f"--{name} {getattr(options, name)}" for name in ("items", "tokens", "answers"))
    page = [
        "# Weights and activations in 8 bits",
        "",
        f"Command: `python -m benchmarks int8_quality {command} --write`",
        f"Date: {datetime.date.today()}. Commit: {commit()}. {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}, transformers {transformers.__version__}, fp32.",
        "",
        f"Tiny random checkpoints, {options.items} items of {options.tokens} greedy tokens each. Errors are "
        "in standard deviations: of the rows, and of the fp32 logits. *Same best token*: share of positions, "
        "each after the fp32 model's own tokens. The tiny models' logits lie close together: these are hard "
        "cases.",
        "",
        "| family | --quantization | bytes of fp32's | largest row error | largest logit error | mean | "
        "same best token |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {line.family} | {line.quantization} | {100 * line.share_of_bytes:.0f} % | {line.rows:.3f} "
            f"| {line.largest:.3f} | {line.mean:.4f} | {100 * line.agree:.1f} % |"
            for line in lines
        ),
    ]
    if right:
        page += [
            "",
            f"The demo model, {options.answers} held-out questions through `triptych serve`, whole answers:",
            "",
            "| --quantization | right |",
            "| --- | --- |",
            *(f"| {name} | {100 * share:.1f} % |" for name, share in right.items()),
        ]
    page += [
        "",
        f"A layer of {LAYER[0]} by {LAYER[1]} on one thread; 8 bits take a quarter of the memory of fp32 and "
        "half of that of bfloat16. Load averages: "
        + " ".join(f"{value:.1f}" for value in os.getloadavg())
        + ".",
        "",
        "| dtype | rows | prepacked, CPU ms | int8, CPU ms | w8a8, CPU ms | prepacked by w8a8 |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {speed.dtype} | {speed.rows} | {speed.plain:.2f} | {speed.int8:.2f} | {speed.w8a8:.2f} "
            f"| {speed.plain / speed.w8a8:.2f} |"
            for speed in times
        ),
    ]
    return "\n".join(page) + "\n"


if __name__ == "__main__":
    main()
