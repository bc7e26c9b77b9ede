"""`triptych profile`: measures every stage with the real parts and fits its costs."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping
from contextlib import closing

import torch

from triptych.config import EncoderConfig, PDConfig
from triptych.cpu.threads import decoder_threads, tower_threads
from triptych.goodput.report.machine import describe, load_average
from triptych.machine.resources import available_memory
from triptych.models.base import EncoderSide
from triptych.models.registry import (
    generation_defaults,
    load_decoder,
    load_encoder,
    resolve_device,
    resolve_dtype,
)
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.progress.progress import Progress, step
from triptych.simulator.costs.checkpoint_shape import shape_of
from triptych.simulator.costs.costs import CostModel, EncoderCosts, ModelShape, PDCosts, ProxyCosts
from triptych.simulator.profile import pd, timing
from triptych.simulator.profile.encoder import prepare_samples, tower_samples
from triptych.simulator.profile.fit import TERMS, Fit, Sample, fit_costs
from triptych.simulator.profile.profile import Profile, ProfileOptions, Settings
from triptych.simulator.profile.proxy import proxy_samples
from triptych.simulator.profile.store import transfer_samples

#: Share of the free memory that the KV cache of the measurement may take.
_KV_SHARE = 0.25

#: What the progress counts: proxy, store, preprocessing, tower, prompts, steps.
_STAGES = 6


def measure(options: ProfileOptions) -> Profile:
    """The profile of this machine. ConfigError for a model or a device that cannot be served."""
    with step("profile", _STAGES, "stages") as stages:
        return _measure(options, stages)


def _measure(options: ProfileOptions, stages: Progress) -> Profile:
    load_before = load_average()
    model = _ModelStages(options)
    samples: dict[str, list[Sample]] = {}
    samples["proxy"], trips = proxy_samples(model.effort)
    stages.advance()
    samples["save"], samples["load"] = transfer_samples(model.effort)
    stages.advance()
    threads_before = torch.get_num_threads()
    try:
        shape = model.measure(samples, stages)
    finally:
        torch.set_num_threads(threads_before)
    fits = {stage: fit_costs(taken, TERMS[stage]) for stage, taken in samples.items()}
    machine, settings = describe(load_before), model.settings()
    when = datetime.date.today().isoformat()
    costs = CostModel(
        name=f"{options.name} on {machine.chip}",
        source=f"`triptych profile` of {options.name} ({settings.dtype}) on {machine.chip}, {when}",
        encoder=EncoderCosts(**_terms(fits, "prepare", "tower", "save")),
        pd=PDCosts(**_terms(fits, "step", "load", "intake")),
        proxy=ProxyCosts(**_terms(fits, "proxy")),
        rpc=statistics.median(trips) / 2,
    )
    return Profile(costs, shape, settings, machine, fits, samples)


def _terms(fits: Mapping[str, Fit], *stages: str) -> dict[str, float]:
    return {term: cost for stage in stages for term, cost in fits[stage].costs.items()}


class _ModelStages:
    """The stages of tower and decoder, under the settings with which workers serve them."""

    def __init__(self, options: ProfileOptions) -> None:
        self._options = options
        self._device = resolve_device(options.device)
        self._dtype = resolve_dtype(options.model, self._device, options.dtype)
        self._encoder = EncoderConfig(
            model=str(options.model), device=options.device, threads=options.threads
        )
        self._pd = PDConfig(model=str(options.model), threads=options.threads, device=options.device)
        self._encoder_threads = self._pd_threads = 0
        self.effort = timing.QUICK if options.quick else timing.FULL

    def measure(self, samples: dict[str, list[Sample]], stages: Progress) -> ModelShape:
        """Adds the samples of both sides' stages to `samples`; the checkpoint's sizes."""
        encoder = load_encoder(self._options.model, device=self._device, dtype=self._dtype)
        self._encoder_threads = tower_threads(self._encoder.threads, self._encoder.cpus)
        torch.set_num_threads(self._encoder_threads)
        samples["prepare"] = prepare_samples(encoder, self.effort)
        stages.advance()
        samples["tower"] = tower_samples(encoder, self.effort, self._encoder.batch_patches)
        stages.advance()
        return self._decoder(encoder, samples, stages)

    def _decoder(
        self, encoder: EncoderSide, samples: dict[str, list[Sample]], stages: Progress
    ) -> ModelShape:
        path = self._options.model
        decoder = load_decoder(
            path, device=self._device, dtype=self._dtype, attn_implementation=ATTENTION_NAME
        )
        self._pd_threads = decoder_threads(self._pd.threads, decoder.geometry.hidden_size)
        torch.set_num_threads(self._pd_threads)
        length = pd.model_len(decoder)
        prompts, tokenizer = open_checkpoint(path, decoder, length)
        shape = shape_of(path, encoder, decoder, prompts)
        samples["intake"] = pd.intake_samples(prompts, decoder, self.effort)
        stages.advance()
        most = int(_KV_SHARE * self._free_memory()) // shape.kv_token_bytes // 4
        grid = pd.scenarios(self._pd, length, quick=self._options.quick, most_tokens=most)
        config = pd.pd_config(self._pd, decoder, grid)
        with closing(pd.StepBench(config, decoder, tokenizer, generation_defaults(path))) as bench:
            samples["step"] = pd.step_samples(bench, grid, self.effort)
        return shape

    def settings(self) -> Settings:
        cuda = self._device.type == "cuda"
        return Settings(
            model=self._options.name,
            device=str(torch.cuda.get_device_name(self._device)) if cuda else self._device.type,
            dtype=str(self._dtype).removeprefix("torch."),
            encoder_threads=self._encoder_threads,
            pd_threads=self._pd_threads,
            quick=self._options.quick,
            max_num_batched_tokens=self._pd.max_num_batched_tokens,
            encoder_batch_patches=self._encoder.batch_patches,
        )

    def _free_memory(self) -> int:
        """Free bytes where the KV cache is allocated."""
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return available_memory()
