"""The device and the memory of each worker of one machine, where the flags leave them to us."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.config import CUDA_CONTEXT_BYTES, EMBEDDING_MEMORY, GIB, MIB
from triptych.launch.plan.devices import Device, Need, find_devices, place_workers, share_table
from triptych.launch.plan.memory import (
    WORKER_BASE_BYTES,
    check_fits,
    decoding_budget,
    plan_memory,
    weight_bytes,
)
from triptych.launch.plan.shape import ClusterShape, shape_of
from triptych.machine.resources import available_memory

logger = logging.getLogger(__name__)

#: Of a GPU, before it is measured: what a step takes above the weights, and the least KV cache of use.
_ACTIVATION_BYTES = GIB
_LEAST_KV_BYTES = 256 * MIB


def check_memory(path: Path, values: Mapping[str, Any], store_memory: int) -> dict[str, dict[str, Any]]:
    """The flags that workers get by their memory, by name; ConfigError, with the sum, for what does not fit.

    GPUs are not looked at here.
    """
    shape, on_cpu = shape_of(values), values["device"] == "cpu"
    dtype = "float32" if values["dtype"] == "auto" else values["dtype"]
    weights = weight_bytes(path, dtype, values["quantization"])
    swap = values["swap_memory"] if values["preemption"] == "swap" else 0
    plan = plan_memory(
        weights,
        shape=shape,
        kv_memory=values["kv_memory"] if on_cpu else 0,
        encoder_cache_memory=values["encoder_cache_memory"] or EMBEDDING_MEMORY,
        media_memory=values["encoder_media_memory"],
        prepared_memory=values["prepared_memory"],
        store_memory=store_memory,
        swap_memory=swap,
        weights_in_ram=on_cpu,
    )
    available = available_memory()
    check_fits(plan, available)
    if not on_cpu or values["kv_memory"] or values["device_memory"]:
        return {}
    own = WORKER_BASE_BYTES + weights + (values["encoder_cache_memory"] or EMBEDDING_MEMORY) + swap
    own += values["encoder_media_memory"] + values["prepared_memory"] if shape.replicas else 0
    budget = decoding_budget(plan, available, own=own, shape=shape)
    return {name: {"device_memory": budget} for name, decodes in _workers(shape) if decodes}


def place_on_gpus(
    path: Path, values: Mapping[str, Any], find: Callable[[str], Sequence[Device]] = find_devices
) -> dict[str, dict[str, Any]]:
    """--device and --device-memory of workers, by name; ConfigError where the GPUs have no room for one."""
    if not values["device"].startswith("cuda"):
        return {}
    devices = find(values["device"])
    needs = gpu_needs(weight_bytes(path, values["dtype"], values["quantization"]), values)
    shares = place_workers(devices, needs)
    logger.info("memory of the GPUs:\n%s", share_table(devices, shares))
    return {share.worker: {"device": share.device, "device_memory": share.nbytes} for share in shares}


def gpu_needs(weights: int, values: Mapping[str, Any]) -> list[Need]:
    """What each worker takes of a GPU at least; all `weights`, in bytes, count for each: an upper bound."""
    each = CUDA_CONTEXT_BYTES + weights + _ACTIVATION_BYTES
    kv = (values["encoder_cache_memory"] or EMBEDDING_MEMORY) + (values["kv_memory"] or _LEAST_KV_BYTES)
    given = values["device_memory"]
    return [
        Need(name, given or each + (kv if decodes else 0), grows=decodes and not given)
        for name, decodes in _workers(shape_of(values))
    ]


def _workers(shape: ClusterShape) -> list[tuple[str, bool]]:
    """Name of each worker, and whether it has a decoder."""
    kinds = (
        ("pd", shape.pd_workers, True),
        ("encoder", shape.encoders, False),
        ("colocated", shape.replicas, True),
    )
    return [(f"{kind}-{index}", decodes) for kind, count, decodes in kinds for index in range(count)]
