"""`triptych profile`: every stage measured with its real parts, the costs fitted, the file and the report."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from PIL import Image

from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.cpu.threads import decoder_threads, tower_threads
from triptych.base.machine.resources import available_memory
from triptych.base.progress import Progress
from triptych.base.types import JsonObject
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.images import ImageProcessor
from triptych.models.registry import (
    generation_defaults,
    load_decoder,
    load_encoder,
    resolve_device,
    resolve_dtype,
)
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import PromptBuilder, open_checkpoint
from triptych_bench.goodput.report.machine import Machine, describe, load_average
from triptych_bench.simulator.costs.costs import CostModel, EncoderCosts, ModelShape, PDCosts, ProxyCosts
from triptych_bench.simulator.profile import fit, pd
from triptych_bench.simulator.profile.encoder import prepare_samples, tower_samples, transfer_samples
from triptych_bench.simulator.profile.fit import Effort, Fit, Sample
from triptych_bench.simulator.profile.proxy import proxy_samples

FORMAT = "triptych-profile/1"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure: `model` is a checkpoint folder; `threads` 0 means the workers' default."""

    model: Path
    name: str
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs and sizes, with the fits and samples that they come from, and the settings of the measurement."""

    costs: CostModel
    shape: ModelShape
    settings: JsonObject
    machine: Machine
    fits: dict[str, Fit]
    samples: dict[str, list[Sample]]


def write_profile(path: Path, result: Profile) -> None:
    """Writes JSON with the costs on top, as `read_profile` reads them."""
    parts = asdict(result)
    costs = parts.pop("costs")
    parts["machine"]["loaded"] = result.machine.loaded
    document = {"format": FORMAT} | costs | parts
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def report(result: Profile) -> str:
    """The costs, the errors of the fits on held-out samples, and the state of the machine."""
    machine = result.machine
    lines = [result.costs.source, ""]
    for stage, one in result.fits.items():
        costs = ", ".join(f"{name} {seconds(cost)}" for name, cost in one.costs.items())
        lines.append(f"{stage:8} {costs}")
        lines.append(
            f"{'':8} error {one.median_error:.0%} median, {one.p90_error:.0%} P90 of {one.held_out} samples "
            f"not fitted; {one.samples} in all"
        )
    lines.append(f"{'rpc':8} {seconds(result.costs.rpc)} one way")
    lines.append("")
    lines.append(f"load average {machine.load_before:g} before, {machine.load_after:g} after")
    if machine.loaded:
        lines.append(
            f"MADE ON A LOADED MACHINE ({machine.load_before:g} on {machine.cores} cores): measure again"
        )
    return "\n".join(lines)


def seconds(value: float) -> str:
    """In the unit that leaves one to three digits before the point."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if value >= scale), (1e-12, "ps"))
    return f"{value / scale:.3g} {unit}" if value else "0"


#: Share of the free memory that the KV cache of the measurement may take.
_KV_SHARE = 0.25
#: What the progress counts: proxy, store, preprocessing, tower, prompts, steps.
_STAGES = 6


def measure(options: ProfileOptions) -> Profile:
    """The profile of this machine, every stage with its real parts. ConfigError for a model or a device that
    cannot be served.
    """
    resolve_device(options.device)
    load_before, threads_before = load_average(), torch.get_num_threads()
    effort = fit.QUICK if options.quick else fit.FULL
    samples: dict[str, list[Sample]] = {}
    with Progress("profile", _STAGES, "stages") as stages:

        def add(**taken: list[Sample]) -> None:
            samples.update(taken)
            stages.advance()

        proxy, trips = proxy_samples(effort)
        add(proxy=proxy)
        saves, loads = transfer_samples(effort)
        add(save=saves, load=loads)
        try:
            shape, settings = _measure_model(options, effort, add)
        finally:
            torch.set_num_threads(threads_before)
    fits = {stage: fit.fit_costs(taken, fit.TERMS[stage]) for stage, taken in samples.items()}
    machine, when = describe(load_before), datetime.date.today().isoformat()
    costs = CostModel(
        name=f"{options.name} on {machine.chip}",
        source=f"`triptych profile` of {options.name} ({settings['dtype']}) on {machine.chip}, {when}",
        encoder=EncoderCosts(**_terms(fits, "prepare", "tower", "save")),
        pd=PDCosts(**_terms(fits, "step", "load", "intake")),
        proxy=ProxyCosts(**_terms(fits, "proxy")),
        rpc=statistics.median(trips) / 2,
    )
    return Profile(costs, shape, settings, machine, fits, samples)


def _terms(fits: Mapping[str, Fit], *stages: str) -> dict[str, float]:
    return {term: cost for stage in stages for term, cost in fits[stage].costs.items()}


def _measure_model(
    options: ProfileOptions, effort: Effort, add: Callable[..., None]
) -> tuple[ModelShape, JsonObject]:
    """The stages of tower and decoder, under the settings that workers serve them with; and its sizes."""
    path, threads = options.model, options.threads
    device = resolve_device(options.device)
    dtype = resolve_dtype(path, device, options.dtype)
    encoding = EncoderConfig(model=str(path), device=options.device, threads=threads)
    serving = PDConfig(model=str(path), device=options.device, threads=threads)
    encoder = load_encoder(path, device=device, dtype=dtype)
    encoder_threads = tower_threads(encoding.threads, encoding.cpus)
    torch.set_num_threads(encoder_threads)
    add(prepare=prepare_samples(encoder, effort))
    add(tower=tower_samples(encoder, effort, encoding.batch_patches))
    decoder = load_decoder(path, device=device, dtype=dtype, attn_implementation=ATTENTION_NAME)
    pd_threads = decoder_threads(serving.threads, decoder.geometry.hidden_size)
    torch.set_num_threads(pd_threads)
    length = pd.model_len(decoder)
    prompts, tokenizer = open_checkpoint(path, decoder, length)
    shape = shape_of(path, encoder, decoder, prompts)
    add(intake=pd.intake_samples(prompts, decoder, effort))
    cuda = device.type == "cuda"
    free = int(torch.cuda.mem_get_info(device)[0]) if cuda else available_memory()
    maximum = int(_KV_SHARE * free) // shape.kv_token_bytes // 4
    grid = pd.scenarios(serving, length, quick=options.quick, max_tokens=maximum)
    config = pd.pd_config(serving, decoder, grid)
    with closing(pd.StepBench(config, decoder, tokenizer, generation_defaults(path))) as bench:
        add(step=pd.step_samples(bench, grid, effort))
    settings = {
        "model": options.name,
        "device": str(torch.cuda.get_device_name(device)) if cuda else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "encoder_threads": encoder_threads,
        "pd_threads": pd_threads,
        "quick": options.quick,
        "max_num_batched_tokens": serving.step_tokens,
        "encoder_batch_patches": encoding.batch_patches,
    }
    return shape, settings


_PROBE = (64, 64)


def shape_of(path: Path, encoder: EncoderSide, decoder: DecoderSide, prompts: PromptBuilder) -> ModelShape:
    """Sizes of the checkpoint in `path`, whose two sides and prompts are given."""
    geometry = decoder.geometry
    text, picture = _tokens(prompts, []), _tokens(prompts, [{"type": "image"}])
    values = {
        "row_bytes": encoder.width * encoder.dtype.itemsize,
        "kv_token_bytes": 2
        * geometry.num_layers
        * geometry.num_kv_heads
        * geometry.head_dim
        * decoder.dtype.itemsize,
        "prompt_overhead_tokens": text - 1,
        # The image's own token makes room for the placeholder.
        "item_overhead_tokens": max(0, picture - text - 1),
    }
    images = ImageProcessor(path)
    item = encoder.preprocess(Image.new("RGB", _PROBE, "grey"), {})
    if not item.grid_thw:
        height, width = item.tensors["pixel_values"].shape[-2:]
        patch = round((height * width / item.cost) ** 0.5)
        pixels = int(height * width)
        return ModelShape(patch, 1, pixels, pixels, fixed_rows=item.rows, **values)
    size = dict(images.get("size"))
    return ModelShape(
        patch=int(images.get("patch_size")),
        merge=int(images.get("merge_size")),
        min_pixels=int(size["shortest_edge"]),
        max_pixels=int(size["longest_edge"]),
        **values,
    )


def _tokens(prompts: PromptBuilder, parts: list[dict[str, str]]) -> int:
    """Of a conversation with these parts and a text of one token."""
    content = [*parts, {"type": "text", "text": "x"}]
    return len(prompts.tokenize(json.dumps([{"role": "user", "content": content}]).encode()))
