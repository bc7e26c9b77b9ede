"""`triptych profile`: what each stage costs on this machine, measured with the real parts, fitted, judged."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from triptych.config import EncoderConfig, PDConfig
from triptych.goodput.report.machine import Machine, describe, load_average
from triptych.simulator.costs.costs import CostModel, EncoderCosts, ModelShape, PDCosts, ProxyCosts
from triptych.simulator.profile.fit import TERMS, Fit, Sample, fit_costs

if TYPE_CHECKING:
    import torch

    from triptych.models.base import EncoderSide
    from triptych.simulator.profile.timing import Effort

FORMAT = "triptych-profile/1"
#: Of the memory that is free, the share that the KV cache of the measurement may take.
_KV_SHARE = 0.25
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """`model` is a checkpoint folder; `threads` 0 means: as the workers choose."""

    model: Path
    name: str
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What was measured, beside the model."""

    model: str
    device: str
    dtype: str
    encoder_threads: int
    pd_threads: int
    quick: bool
    max_num_batched_tokens: int
    encoder_batch_patches: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs and sizes, and all that they were made of."""

    costs: CostModel
    shape: ModelShape
    settings: Settings
    machine: Machine
    fits: dict[str, Fit]
    samples: dict[str, list[Sample]]


def write_profile(path: Path, found: Profile) -> None:
    """JSON with the costs on top, as `read_costs` takes them."""
    document = (
        {"format": FORMAT}
        | asdict(found.costs)
        | {
            "shape": asdict(found.shape),
            "settings": asdict(found.settings),
            "machine": asdict(found.machine) | {"loaded": found.machine.loaded},
            "fits": {stage: asdict(fit) for stage, fit in found.fits.items()},
            "samples": {stage: [asdict(one) for one in taken] for stage, taken in found.samples.items()},
        }
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def profile(options: ProfileOptions, say: Callable[[str], None] = lambda line: None) -> Profile:
    """Measures this machine; `say` is called with every stage as it begins.

    ConfigError for a model or a device that cannot be served.
    """
    load_before = load_average()
    import torch

    from triptych.models.registry import resolve_device, resolve_dtype

    device = resolve_device(options.device)
    dtype = resolve_dtype(options.model, device, options.dtype)
    served = _Served(options, device, dtype)
    samples: dict[str, list[Sample]] = {}
    say("the proxy and its messages")
    samples["proxy"], trips = _proxy(served.effort)
    say("saves and loads")
    samples["save"], samples["load"] = _transfers(served.effort)
    threads_before = torch.get_num_threads()
    try:
        shape = served.model(samples, say)
    finally:
        torch.set_num_threads(threads_before)
    fits = {stage: fit_costs(taken, TERMS[stage]) for stage, taken in samples.items()}
    machine = describe(load_before)
    settings = served.settings()
    when = datetime.date.today().isoformat()
    source = f"`triptych profile` of {options.name} ({settings.dtype}) on {machine.chip}, {when}"
    costs = CostModel(
        name=f"{options.name} on {machine.chip}",
        source=source,
        encoder=EncoderCosts(**_terms(fits, "prepare", "tower", "save")),
        pd=PDCosts(**_terms(fits, "step", "load", "intake")),
        proxy=ProxyCosts(**_terms(fits, "proxy")),
        rpc=statistics.median(trips) / 2,
    )
    return Profile(costs, shape, settings, machine, fits, samples)


class _Served:
    """The two sides under the settings with which they are served."""

    def __init__(self, options: ProfileOptions, device: torch.device, dtype: torch.dtype) -> None:
        from triptych.simulator.profile.timing import FULL, QUICK

        self._options, self._device, self._dtype = options, device, dtype
        self._encoder = EncoderConfig(
            model=str(options.model), device=options.device, threads=options.threads
        )
        self._pd = PDConfig(model=str(options.model), threads=options.threads, device=options.device)
        self._threads = [0, 0]
        self.effort: Effort = QUICK if options.quick else FULL

    def model(self, samples: dict[str, list[Sample]], say: Callable[[str], None]) -> ModelShape:
        """The checkpoint's sizes; the samples of both sides' stages are put into `samples`."""
        import torch

        from triptych.cpu.threads import tower_threads
        from triptych.models.registry import load_encoder
        from triptych.simulator.profile.encoder import prepare_samples, tower_samples

        say("the encoder: preprocessing and tower")
        encoder = load_encoder(self._options.model, device=self._device, dtype=self._dtype)
        self._threads[0] = tower_threads(self._encoder.threads, self._encoder.cpus)
        torch.set_num_threads(self._threads[0])
        samples["prepare"] = prepare_samples(encoder, self.effort)
        samples["tower"] = tower_samples(encoder, self.effort, self._encoder.batch_patches)
        return self._decoder(encoder, samples, say)

    def _decoder(
        self, encoder: EncoderSide, samples: dict[str, list[Sample]], say: Callable[[str], None]
    ) -> ModelShape:
        import torch

        from triptych.cpu.threads import decoder_threads
        from triptych.models.registry import load_decoder
        from triptych.pd_worker.attention.attention import ATTENTION_NAME
        from triptych.pd_worker.frontend.prompt import open_checkpoint
        from triptych.simulator.costs.checkpoint_shape import shape_of
        from triptych.simulator.profile import pd

        say("the decoder's steps")
        path = self._options.model
        decoder = load_decoder(
            path, device=self._device, dtype=self._dtype, attn_implementation=ATTENTION_NAME
        )
        self._threads[1] = decoder_threads(self._pd.threads, decoder.geometry.hidden_size)
        torch.set_num_threads(self._threads[1])
        length = pd.model_len(decoder)
        prompts, tokenizer = open_checkpoint(path, decoder, length)
        shape = shape_of(path, encoder, decoder, prompts)
        samples["intake"] = pd.intake_samples(prompts, decoder, self.effort)
        grid = pd.scenarios(
            self._pd,
            length,
            quick=self._options.quick,
            most_tokens=int(_KV_SHARE * self._memory()) // shape.kv_token_bytes // 4,
        )
        with pd.step_bench(path, self._pd, decoder, tokenizer, grid) as bench:
            samples["step"] = pd.step_samples(bench, grid, self.effort)
        return shape

    def settings(self) -> Settings:
        return Settings(
            model=self._options.name,
            device=self._device_name(),
            dtype=str(self._dtype).removeprefix("torch."),
            encoder_threads=self._threads[0],
            pd_threads=self._threads[1],
            quick=self._options.quick,
            max_num_batched_tokens=self._pd.max_num_batched_tokens,
            encoder_batch_patches=self._encoder.batch_patches,
        )

    def _device_name(self) -> str:
        import torch

        if self._device.type == "cuda":
            return str(torch.cuda.get_device_name(self._device))
        return self._device.type

    def _memory(self) -> int:
        """Bytes that are free where the KV cache lies."""
        import torch

        from triptych.machine.resources import available_memory

        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return available_memory()


def _proxy(effort: Effort) -> tuple[list[Sample], list[float]]:
    from triptych.simulator.profile.proxy import proxy_samples

    return proxy_samples(effort)


def _transfers(effort: Effort) -> tuple[list[Sample], list[Sample]]:
    from triptych.simulator.profile.store import transfer_samples

    return transfer_samples(effort)


def _terms(fits: Mapping[str, Fit], *stages: str) -> dict[str, float]:
    return {term: cost for stage in stages for term, cost in fits[stage].costs.items()}


def report(found: Profile) -> str:
    """The costs, how far the fits are from samples that they have not seen, and where this was."""
    machine = found.machine
    lines = [found.costs.source, ""]
    for stage, fit in found.fits.items():
        costs = ", ".join(f"{name} {seconds(cost)}" for name, cost in fit.costs.items())
        lines.append(f"{stage:8} {costs}")
        lines.append(
            f"{'':8} error {fit.median_error:.0%} median, {fit.p90_error:.0%} P90 of {fit.held_out} samples "
            f"not fitted; {fit.samples} in all"
        )
    lines.append(f"{'rpc':8} {seconds(found.costs.rpc)} one way")
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
