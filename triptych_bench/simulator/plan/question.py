"""What a plan is asked: a load, its objectives, what the devices cost in seconds and in dollars."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.base.config import GIB, PDConfig, ProxyConfig
from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.workload import Workload
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.simulator.cluster.shape import ClusterShape, Limits, on_devices
from triptych_bench.simulator.costs.costs import (
    CHIPS,
    Chip,
    CostModel,
    ModelShape,
    published,
    read_profile,
)
from triptych_bench.simulator.costs.model_config import QWEN3_VL, PlannedModel

#: Short for the only kind of it that we have figures of.
SHORT_NAMES = {"a100": "a100-80g"}
#: Of an accelerator's memory, the share that weights, keys and values may take; the rest is activations.
MEMORY_SHARE = 0.9
#: Flags of the services on an accelerator; those of a profile keep their defaults.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048
ENCODER_CACHE, STORE_MEMORY = 4 * GIB, 64 * GIB
#: Overload is to be seen as latency, not as refusals.
_PROXY = ProxyConfig(max_queue=1_000_000)
MAX_DEVICES, MAX_RANKS = 64, 8
#: Of a PD worker's costs, those of its steps.
_STEP_COSTS = ("step", "prefill_token", "decode_seq", "context_token", "prefill_context")


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """`hour`: dollars for one; None: no price is known. A PD worker or replica takes `ranks` of them."""

    name: str
    costs: CostModel
    model: ModelShape
    limits: Limits
    hour: float | None = None
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Question:
    """`devices` are spread over the pools. `seed` decides everything; `repeats`: loads of the answer.

    `device` is that of PD workers and replicas, and of encoders where `encoder_device` is None. `budget`:
    dollars per hour that a shape may cost, in the place of `devices`; 0: none.
    """

    workload: Workload
    workload_name: str
    slo: Slo
    device: PlannedDevice
    devices: int = 4
    seed: int = 0
    repeats: int = 3
    encoder_device: PlannedDevice | None = None
    budget: float = 0.0

    @property
    def encoders_on(self) -> PlannedDevice:
        return self.encoder_device or self.device

    @property
    def devices_named(self) -> str:
        """As tables name them."""
        if self.encoder_device is None:
            return self.device.name
        return f"{self.encoder_device.name} (E) and {self.device.name} (PD, replicas)"

    def apart(self, encoders: int, pd_workers: int, *, prefill: int = 0) -> ClusterShape:
        """So many of both, with `prefill` of the PD workers for prompts; the encoders have their own device's
        costs."""
        own = self.encoder_device.costs.encoder if self.encoder_device is not None else None
        return on_devices(encoders, pd_workers, own, prefill=prefill)

    def devices_in(self, shape: ClusterShape) -> int:
        """Devices that a shape takes."""
        return len(shape.workers) + (self.device.ranks - 1) * shape.pd_workers

    def hourly(self, shape: ClusterShape) -> float | None:
        """Dollars per hour of a shape; None without prices."""
        price, encoder_price = self.device.hour, self.encoders_on.hour
        encoders = sum(not worker.decodes for worker in shape.workers)
        if price is None or (encoders and encoder_price is None):
            return None
        return shape.pd_workers * self.device.ranks * price + encoders * (encoder_price or 0.0)


def parse_prices(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Dollars per hour of the named devices: "1.5" for each of them, or "a100=1.5,b60=0.4".

    ConfigError for what is neither, for a device that is not planned with, and for one left out.
    """
    result: dict[str, float] = {}
    for word in text.split(",") if text else ():
        name, _, price = word.rpartition("=")
        try:
            given = dict.fromkeys((name.strip().lower(),) if name else names, float(price))
        except ValueError:
            raise ConfigError(f"--price {text!r}: write 1.5, or a100=1.5,b60=0.4 per device") from None
        if again := ", ".join(sorted(given.keys() & result.keys())):
            raise ConfigError(f"--price {text!r} names {again} twice: give each device one price")
        result |= given
    if unknown := result.keys() - set(names):
        raise ConfigError(f"--price names {', '.join(sorted(unknown))}, but devices are {', '.join(names)}")
    if text and (missing := set(names) - result.keys()):
        raise ConfigError(f"--price {text!r} leaves out {', '.join(sorted(missing))}: give each a price")
    return result


def read_device(
    name: str,
    hour: float | None = None,
    flag: str = "--gpu",
    ranks: int = 1,
    speed: float = 1.0,
    served: PlannedModel = QWEN3_VL,
) -> PlannedDevice:
    """A device by its name, or a file of `triptych profile`. `hour`: dollars for one, where it is known.

    `flag` gave the name. A named device serves `served`, a profile its own model. A PD worker has `ranks`
    devices, whose steps are `speed` times as fast as those of one.
    ConfigError for what is neither, and for ranks that cannot be.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"--pd-ranks {ranks} must be between 1 and {MAX_RANKS}")
    if not (1 <= speed <= ranks):
        raise ConfigError(
            f"--pd-rank-speed {speed:g} must be between 1 and --pd-ranks {ranks}: measure how many times as "
            "fast the steps of so many ranks are"
        )
    if hour is not None and not 0 <= hour < math.inf:
        raise ConfigError(f"--price {hour:g} must be dollars per hour and device, 0 or above")
    path = Path(name)
    if (known := SHORT_NAMES.get(name.lower(), name.lower())) in CHIPS:
        costs = published(known, served.geometry, served.name)
        model, limits, title = served.shape, _on(CHIPS[known], ranks, served), CHIPS[known].name
        if served is not QWEN3_VL:
            title += f" with {served.name}"
        if model.fixed_rows:
            costs = replace(
                costs, source=f"{costs.source}; every picture is one tile of {model.fixed_rows} rows"
            )
    elif path.is_file():
        if served is not QWEN3_VL:
            raise ConfigError(f"--model goes with named devices; {flag} {name} has the model of its profile")
        (costs, model), limits = read_profile(path, flag), Limits(proxy=_PROXY)
        title = costs.name
    else:
        names = ", ".join(sorted({*SHORT_NAMES, *CHIPS}))
        raise ConfigError(f"{flag} {name!r} is neither a file of `triptych profile` nor one of {names}")
    # All else of a PD worker is as with one rank.
    steps = {cost: getattr(costs.pd, cost) / speed for cost in _STEP_COSTS}
    costs = replace(costs, pd=replace(costs.pd, **steps))
    title += f" (PD workers of {ranks} ranks)" if ranks > 1 else ""
    return PlannedDevice(title, costs, model, limits, hour, ranks)


def _on(chip: Chip, ranks: int, served: PlannedModel) -> Limits:
    """Keys and values take what is left of the memory: ranks divide the weights, embeddings are in each."""
    weights = 2 * served.geometry.stored_parameters
    kv_memory = ranks * (round(chip.memory * MEMORY_SHARE) - ENCODER_CACHE) - weights
    if kv_memory <= 0:
        raise ConfigError(
            f"{served.name} has {weights / 1e9:.0f} GB of decoder weights, too much for {ranks} x "
            f"{chip.name} of {chip.memory / 1e9:.0f} GB: raise --pd-ranks, or plan with larger devices"
        )
    pd = PDConfig(
        kv_memory=kv_memory,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        encoder_cache_memory=ENCODER_CACHE,
    )
    return Limits(proxy=_PROXY, pd=pd, store_memory=STORE_MEMORY)


def check_question(question: Question) -> None:
    """ConfigError naming the flag of what cannot be answered."""
    if not question.slo.limits:
        raise ConfigError('--slo is empty: say what a sustained rate keeps to, like "ttft:2000 tpot:50"')
    if question.encoder_device is not None:
        _check_unequal(question)
    minimum = 1 + question.device.ranks
    if question.budget:
        _check_budget(question)
    elif not minimum <= question.devices <= MAX_DEVICES:
        raise ConfigError(
            f"--devices {question.devices} must be between {minimum}, a worker for each pool, and "
            f"{MAX_DEVICES}; use --scale for more"
        )
    if question.repeats < 1:
        raise ConfigError(f"--repeats {question.repeats} must be at least 1")


def _check_unequal(question: Question) -> None:
    encoder, pd = question.encoders_on, question.device
    if encoder.model.row_bytes != pd.model.row_bytes or encoder.model.patch != pd.model.patch:
        raise ConfigError(
            f"--encoder-gpu {encoder.name} and --pd-gpu {pd.name} are of different models: one "
            "cannot use the other's embeddings; profile both with one model"
        )
    if not question.budget:
        raise ConfigError(
            "--encoder-gpu: shapes of unequal devices compare by what they cost; give --budget, dollars per "
            "hour, and --price for both"
        )


def _check_budget(question: Question) -> None:
    budget, minimum = question.budget, question.hourly(question.apart(1, 1))
    if minimum is None:
        raise ConfigError("--budget needs --price: what each device costs per hour")
    if not minimum <= budget < math.inf:
        raise ConfigError(f"--budget {budget:g}: one encoder and one PD worker cost {minimum:g} per hour")
    if 0 in (question.device.hour, question.encoders_on.hour):
        raise ConfigError("--budget needs prices above 0: any number of free devices fits")
    maximum = budget / min(question.device.hour or 1.0, question.encoders_on.hour or 1.0)
    if maximum > MAX_DEVICES:
        raise ConfigError(f"--budget {budget:g} buys up to {maximum:.0f} devices, at most {MAX_DEVICES}")
