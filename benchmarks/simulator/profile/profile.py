"""`triptych profile`: what each stage costs on this machine, measured with the real parts, fitted, judged."""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from triptych.config import EncoderConfig, PDConfig
from triptych.goodput.report.machine import Machine, describe, load_average
from triptych.simulator.costs.costs import (
    ClientCosts,
    CostModel,
    EncoderCosts,
    ModelShape,
    PDCosts,
    ProxyCosts,
)
from triptych.simulator.profile.fit import TERMS, Fit, Sample, fit_costs
from triptych.simulator.profile.profile_cores import core_costs
from triptych.simulator.profile.profile_live import (
    LiveWindow,
    colder,
    live_samples,
    live_windows,
    own_core,
    own_core_windows,
    step_ratio,
    take_busy,
)

if TYPE_CHECKING:
    import torch

    from triptych.models.base import EncoderSide
    from triptych.simulator.profile.timing import Effort

FORMAT = "triptych-profile/1"
#: Of the memory that is free, the share that the KV cache of the measurement may take.
_KV_SHARE = 0.25


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
    """What was measured, beside the model. `step_ratio`: steps of a running worker next to steps alone at
    that time; `step_drift`: those alone next to the costs, which were measured a moment before.
    """

    model: str
    device: str
    dtype: str
    encoder_threads: int
    pd_threads: int
    quick: bool
    step_ratio: float
    step_drift: float
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
    """Measures this machine; `say` hears of every stage as it begins.

    ConfigError for a model or a device that cannot be served.
    """
    load_before = load_average()
    import torch

    from triptych.models.registry import resolve_device, resolve_dtype

    device = resolve_device(options.device)
    dtype = resolve_dtype(options.model, device, options.dtype)
    served = _Served(options, device, dtype)
    samples: dict[str, list[Sample]] = {}
    say("cores that others use")
    cores = core_costs(served.effort.live_seconds)
    say("the proxy and its messages")
    samples["proxy"], trips = _proxy(served.effort)
    say("saves and loads")
    samples["save"], samples["load"] = _transfers(served.effort)
    threads_before = torch.get_num_threads()
    try:
        shape, windows, pinned = served.model(samples, say)
    finally:
        torch.set_num_threads(threads_before)
    windows = windows or served.live(say)
    fits = {stage: fit_costs(taken, TERMS[stage]) for stage, taken in samples.items()}
    pd = PDCosts(**_terms(fits, "step", "load", "intake"))
    # One thread on a CPU: what it took is the kernel's word. Else steps are as long as they were alone.
    ratio = step_ratio(windows, pd) if served.one_thread else 1.0
    pd = colder(pd, ratio)
    live = live_samples(windows, pd, one_thread=served.one_thread)
    samples |= live
    fits |= {stage: fit_costs(taken, TERMS[stage]) for stage, taken in live.items()}
    pd = replace(pd, take_busy=take_busy(windows, pd), **_terms(fits, "tell"))
    machine = describe(load_before)
    settings = served.settings(ratio, statistics.median(window.alone for window in windows))
    when = datetime.date.today().isoformat()
    source = f"`triptych profile` of {options.name} ({settings.dtype}) on {machine.chip}, {when}"
    costs = CostModel(
        name=f"{options.name} on {machine.chip}",
        source=source,
        encoder=EncoderCosts(**_terms(fits, "prepare", "tower", "save")),
        pd=pd,
        # A message's tokens cost more in a running cluster than in a stream that never ends.
        proxy=ProxyCosts(**_terms(fits, "proxy") | {k: fits["relay"].costs[k] for k in ("message", "token")}),
        rpc=statistics.median(trips) / 2,
        client=ClientCosts(**_terms(fits, "client")),
        cores=replace(cores, own_core=own_core(pinned, windows)),
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

    def model(
        self, samples: dict[str, list[Sample]], say: Callable[[str], None]
    ) -> tuple[ModelShape, list[LiveWindow], list[LiveWindow]]:
        """The checkpoint's sizes, with the stages of both sides put into `samples`; and windows of a running
        cluster, where its steps are to be set against steps alone, and of one with a core for each worker.

        Else there are none: a cluster then starts when these two sides have left the device.
        """
        import torch

        from triptych.cpu.threads import tower_threads
        from triptych.models.registry import load_encoder
        from triptych.simulator.profile.profile_encoder import prepare_samples, tower_samples

        say("the encoder: preprocessing and tower")
        encoder = load_encoder(self._options.model, device=self._device, dtype=self._dtype)
        self._threads[0] = tower_threads(self._encoder.threads, self._encoder.cpus)
        torch.set_num_threads(self._threads[0])
        samples["prepare"] = prepare_samples(encoder, self.effort)
        samples["tower"] = tower_samples(encoder, self.effort, self._encoder.batch_patches)
        return self._decoder(encoder, samples, say)

    def _decoder(
        self, encoder: EncoderSide, samples: dict[str, list[Sample]], say: Callable[[str], None]
    ) -> tuple[ModelShape, list[LiveWindow], list[LiveWindow]]:
        import torch

        from triptych.cpu.threads import decoder_threads
        from triptych.models.registry import load_decoder
        from triptych.pd_worker.attention.attention import ATTENTION_NAME
        from triptych.pd_worker.frontend.prompt import open_checkpoint
        from triptych.simulator.costs.checkpoint_shape import shape_of
        from triptych.simulator.profile import profile_pd
        from triptych.simulator.profile.profile_intake import intake_samples

        say("the decoder's steps")
        path = self._options.model
        decoder = load_decoder(
            path, device=self._device, dtype=self._dtype, attn_implementation=ATTENTION_NAME
        )
        self._threads[1] = decoder_threads(self._pd.threads, decoder.geometry.hidden_size)
        torch.set_num_threads(self._threads[1])
        length = profile_pd.model_len(decoder)
        prompts, tokenizer = open_checkpoint(path, decoder, length)
        shape = shape_of(path, encoder, decoder, prompts)
        samples["intake"] = intake_samples(prompts, decoder, self.effort)
        grid = profile_pd.scenarios(
            self._pd,
            length,
            quick=self._options.quick,
            most_tokens=int(_KV_SHARE * self._memory()) // shape.kv_token_bytes // 4,
        )
        with profile_pd.step_bench(path, self._pd, decoder, tokenizer, grid) as bench:
            samples["step"] = profile_pd.step_samples(bench, grid, self.effort)
            if not self.one_thread:
                return shape, [], []
            fit = fit_costs(samples["step"], TERMS["step"])

            def alone() -> float:
                return profile_pd.alone(bench, grid, fit)

            return shape, self.live(say, alone), self._own_core(say, alone)

    def live(self, say: Callable[[str], None], alone: Callable[[], float] = lambda: 1.0) -> list[LiveWindow]:
        """Windows of a running cluster with these settings; `alone` as in `live_windows`."""
        say("a cluster that answers texts")
        return live_windows(self._options.model, self._words(), self.effort, alone)

    def _own_core(self, say: Callable[[str], None], alone: Callable[[], float]) -> list[LiveWindow]:
        if len(os.sched_getaffinity(0)) < 2:
            return []
        say("the same with a core for each worker")
        return own_core_windows(self._options.model, self._words(), self.effort, alone)

    def _words(self) -> list[str]:
        options = self._options
        return ["--device", options.device, "--dtype", options.dtype, "--threads", str(options.threads)]

    @property
    def one_thread(self) -> bool:
        """Whether the engine's thread does all of a step's work."""
        return self._device.type == "cpu" and self._threads[1] == 1

    def settings(self, step_ratio: float, step_drift: float) -> Settings:
        return Settings(
            model=self._options.name,
            device=self._device_name(),
            dtype=str(self._dtype).removeprefix("torch."),
            encoder_threads=self._threads[0],
            pd_threads=self._threads[1],
            quick=self._options.quick,
            step_ratio=step_ratio,
            step_drift=step_drift,
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
    from triptych.simulator.profile.profile_proxy import proxy_samples

    return proxy_samples(effort)


def _transfers(effort: Effort) -> tuple[list[Sample], list[Sample]]:
    from triptych.simulator.profile.profile_store import transfer_samples

    return transfer_samples(effort)


def _terms(fits: dict[str, Fit], *stages: str) -> dict[str, Any]:
    return {term: cost for stage in stages for term, cost in fits[stage].costs.items()}
