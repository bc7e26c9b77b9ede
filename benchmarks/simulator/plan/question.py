"""What a plan is asked: a load, its objectives, what the devices cost in seconds and in dollars."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from triptych.config import GIB, PDConfig, ProxyConfig
from triptych.errors import ConfigError
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.slo import Slo
from triptych.simulator.cluster.shape import Limits
from triptych.simulator.costs.costs import CostModel, ModelShape, read_costs, read_shape
from triptych.simulator.costs.published import GPUS, QWEN3_VL_4B, QWEN3_VL_4B_SHAPE, Gpu, gpu, published

#: Short for the only kind of it that we have figures of.
SHORT_NAMES = {"a100": "a100-80g"}
#: Of an accelerator's memory, the share that weights, keys and values may take; the rest is activations.
MEMORY_SHARE = 0.9
#: Flags of the services on an accelerator; those of a profile keep their defaults.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048
ENCODER_CACHE, STORE_MEMORY = 4 * GIB, 64 * GIB
#: Overload is to be seen as latency, not as refusals.
_QUEUE = 1_000_000
MOST_DEVICES = 64


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """`hour`: dollars for one; None: no price is known."""

    name: str
    costs: CostModel
    model: ModelShape
    limits: Limits
    hour: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """`devices` are spread over the pools. `seed` decides everything; `repeats`: loads of the answer."""

    workload: Workload
    workload_name: str
    slo: Slo
    device: PlannedDevice
    devices: int = 4
    seed: int = 0
    repeats: int = 3

    def with_load(self, workload: Workload) -> Question:
        return replace(self, workload=workload)


def read_device(name: str, hour: float | None = None) -> PlannedDevice:
    """A GPU by its name, or a file of `triptych profile`. `hour`: dollars for one, where it is known.

    ConfigError for what is neither.
    """
    if hour is not None and not 0 <= hour < float("inf"):
        raise ConfigError(f"--price {hour:g} must be dollars per hour and device, 0 or above")
    if name.lower() in (*GPUS, *SHORT_NAMES):
        chip = gpu(SHORT_NAMES.get(name.lower(), name))
        costs = published(SHORT_NAMES.get(name.lower(), name))
        return PlannedDevice(chip.name, costs, QWEN3_VL_4B_SHAPE, _on(chip), hour)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted({*SHORT_NAMES, *GPUS}))
        raise ConfigError(f"--gpu {name!r} is neither a file of `triptych profile` nor one of {known}")
    costs = read_costs(path, "--gpu")
    limits = Limits(proxy=ProxyConfig(max_queue=_QUEUE))
    return PlannedDevice(costs.name, costs, read_shape(path, "--gpu"), limits, hour)


def _on(chip: Gpu) -> Limits:
    """Keys and values take what weights and embeddings leave of the memory."""
    weights = 2 * (QWEN3_VL_4B.text_parameters + QWEN3_VL_4B.head_parameters)
    kv_memory = round(chip.memory * MEMORY_SHARE) - weights - ENCODER_CACHE
    return Limits(
        proxy=ProxyConfig(max_queue=_QUEUE),
        pd=PDConfig(
            kv_memory=kv_memory,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            encoder_cache_memory=ENCODER_CACHE,
        ),
        store_memory=STORE_MEMORY,
    )


def check_question(question: Question) -> None:
    """ConfigError naming the flag of what cannot be answered."""
    if not question.slo.limits:
        raise ConfigError('--slo is empty: say what a sustained rate keeps to, like "ttft:2000 tpot:50"')
    if not 2 <= question.devices <= MOST_DEVICES:
        raise ConfigError(
            f"--devices {question.devices} must be between 2, one for each pool, and {MOST_DEVICES}; "
            "use --scale for more"
        )
    if question.repeats < 1:
        raise ConfigError(f"--repeats {question.repeats} must be at least 1")
