"""The memory that a cluster will need on one machine, and the device and memory of each of its workers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.apps.launch.plan.devices import Gpu, Need, Share, find_devices, place_workers, share_table
from triptych.base.config import (
    CPU_SHARE,
    CUDA_CONTEXT_BYTES,
    GIB,
    MIB,
    ClusterConfig,
    PDConfig,
    ServeConfig,
    format_size,
)
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import available_memory
from triptych.base.types import DTYPE_BYTES, JsonObject

#: Interpreter, torch and libraries of one worker, measured on Linux with torch 2.13. An upper bound for
#: forked workers, which share most of it with their fork server.
WORKER_BASE_BYTES = 450 * MIB
PROXY_BASE_BYTES = 120 * MIB
#: Matrices that --quantization leaves unquantized.
_KEPT = re.compile(r"embed|shared|lm_head|proj_out|output_projection|relative_attention_bias")
_SAFETENSORS_DTYPES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a cluster in bytes, by part; None for a part that takes what the others leave."""

    parts: tuple[tuple[str, int | None], ...]

    @property
    def total(self) -> int:
        return sum(nbytes or 0 for _, nbytes in self.parts)

    def table(self) -> str:
        """A printable table: one line per part that takes something, and the total."""
        parts = [(name, nbytes) for name, nbytes in (*self.parts, ("together", self.total)) if nbytes != 0]
        width = max(len(name) for name, _ in parts)
        shown = ((name, "automatic" if nbytes is None else format_size(nbytes)) for name, nbytes in parts)
        return "\n".join(f"  {name:<{width}}  {size:>12}" for name, size in shown)


def weight_bytes(folder: Path, dtype: str, quantization: str = "none", *, dequantized: bool = True) -> int:
    """Bytes of a checkpoint's weights, from the headers of its safetensors files.

    `dtype` "auto" keeps the dtypes of the files, but for weights in 8 bits, which are `dequantized` to 16
    unless vLLM computes with them. With `int8` and `w8a8`, matrices count as 8 bits per element unless their
    name is that of an embedding or a head. With `int8-decoder` and `w8a8-decoder` none do, since names do not
    tell tower from decoder: an upper bound.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"MODEL={folder} has no *.safetensors: other weight files are not read")
    total = 0
    for file in files:
        for name, dims, elements, stored in _tensors_of(file):
            in_8_bits = quantization in ("int8", "w8a8") and dims == 2 and not _KEPT.search(name)
            kept = stored if stored > 1 or not dequantized else 2
            total += elements * (1 if in_8_bits else DTYPE_BYTES.get(dtype, kept))
    return total


def _tensors_of(file: Path) -> list[tuple[str, int, int, int]]:
    """(name, number of dimensions, elements, bytes per element) of each tensor."""
    try:
        with file.open("rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            if not 2 <= size <= 100 * MIB:
                raise ValueError("header size")
            header = json.loads(handle.read(size))
        return [
            (
                name,
                len(entry["shape"]),
                (entry["data_offsets"][1] - entry["data_offsets"][0]) // _SAFETENSORS_DTYPES[entry["dtype"]],
                _SAFETENSORS_DTYPES[entry["dtype"]],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a readable safetensors file: fetch the checkpoint again") from error


def plan_memory(weights: int, config: ClusterConfig) -> MemoryPlan:
    """The memory of a cluster on one machine: an upper bound, since each worker counts with all `weights`.

    Weights and KV caches on a GPU do not count. A single colocated replica keeps embeddings in its process
    and not in the store: they count once.
    """
    counts, encoder, pd = config.counts, config.encoder, config.pd
    workers, encoders, pd_workers = counts.workers, counts.encoding, counts.decoding
    ranks = config.ranks
    # Each rank of a tower is a process with all of its weights, each rank of a decoder one with a share.
    workers += counts.encoding * (ranks["encoder"] - 1)
    shares = counts.decoding * (ranks["pd"] - 1)
    weights, kv_memory = (weights, pd_workers * pd.kv_memory or None) if pd.device == "cpu" else (0, 0)
    embeddings, swap = pd.embedding_memory, config.swap_memory
    return MemoryPlan(
        (
            ("processes", PROXY_BASE_BYTES + (workers + shares) * WORKER_BASE_BYTES),
            (f"weights of {workers} workers, at most", workers * weights),
            (f"KV cache of {pd_workers} PD workers (--kv-memory)", kv_memory),
            (
                f"embeddings of {pd_workers + shares} PD workers or ranks (--encoder-cache-memory)"
                if shares
                else f"embeddings of {pd_workers} PD workers (--encoder-cache-memory)",
                (pd_workers + shares) * embeddings,
            ),
            (f"swapped blocks of {pd_workers} PD workers (--swap-memory)", pd_workers * swap),
            (
                f"media of {encoders} encoders (--encoder-media-memory)",
                encoders * encoder.encoder_media_memory,
            ),
            (f"pixels of {encoders} encoders (--prepared-memory)", encoders * encoder.prepared_memory),
            ("embedding store (--store-memory)", config.store_memory),
        )
    )


def check_fits(plan: MemoryPlan, available: int) -> None:
    """ConfigError with the table when the plan needs more than the available memory."""
    if plan.total > available:
        raise ConfigError(
            f"this needs {format_size(plan.total)} of memory and {format_size(available)} are available: "
            f"lower one of these\n{plan.table()}"
        )


def decoding_budget(plan: MemoryPlan, available: int, *, own: int, decoding: int) -> int:
    """--device-memory of each of `decoding` CPU workers: its `own` bytes, which `plan` has, plus a share.

    They share CPU_SHARE of the memory that the plan, without KV caches, leaves free.
    """
    left = max(0, available - plan.total)
    return own + int(left * CPU_SHARE / max(1, decoding))


logger = logging.getLogger(__name__)

#: Estimates for a GPU before measuring it: bytes of a step above the weights, and the least useful KV cache.
_ACTIVATION_BYTES = GIB
_MIN_KV_BYTES = 256 * MIB


def check_memory(config: ServeConfig) -> dict[str, Share]:
    """The memory of workers that decode on a CPU, by name; ConfigError, with the table, if it does not fit.

    GPUs are not considered here.
    """
    pd, on_cpu = config.pd, config.pd.device == "cpu"
    weights = weight_bytes(Path(config.model), "float32" if pd.dtype == "auto" else pd.dtype, pd.quantization)
    plan = plan_memory(weights, config)
    available = available_memory()
    check_fits(plan, available)
    if not on_cpu or pd.kv_memory or pd.device_memory:
        return {}
    own = WORKER_BASE_BYTES + weights + pd.embedding_memory + config.swap_memory
    if config.counts.replicas:
        own += config.encoder.encoder_media_memory + config.encoder.prepared_memory
    budget = decoding_budget(plan, available, own=own, decoding=config.counts.decoding)
    kinds = config.counts.kinds
    return {name: Share(name, pd.device, budget) for name, kind in kinds.items() if kind != "encoder"}


def place_on_gpus(
    config: ServeConfig, find: Callable[[str], Sequence[Gpu]] = find_devices
) -> dict[str, Share]:
    """The device and memory of each worker, by name; ConfigError where a worker fits no GPU."""
    if not config.pd.device.startswith("cuda"):
        return {}
    devices = find(config.pd.device)
    # Not for a core install, whose doctor uses this module.
    from triptych.models.checkpoint.folder import read_config
    from triptych.models.checkpoint.quantized import quantization_of

    path, pd = Path(config.model), config.pd
    model = read_config(path)
    quantized = bool(quantization_of(model))
    if quantized and _by_vllm(pd, model):
        weights = weight_bytes(path, "auto", dequantized=False)
    else:
        weights = weight_bytes(path, pd.dtype, pd.quantization)
    shares = place_workers(devices, gpu_needs(weights, config))
    logger.info("memory of the GPUs:\n%s", share_table(devices, shares))
    return {share.worker: share for share in shares}


def _by_vllm(pd: PDConfig, model: JsonObject) -> bool:
    from triptych.pd_worker.vllm.connection import choose_engine, vllm_program

    architecture = next(iter(model.get("architectures") or ()), "")
    return choose_engine(pd, architecture, vllm_program()).engine == "vllm"


def gpu_needs(weights: int, config: ServeConfig) -> list[Need]:
    """The least bytes of each worker on each of its GPUs.

    A worker counts with all `weights`, an upper bound, and a PD worker's ranks with their shares of them.
    """
    given, ranks = config.pd.device_memory, config.ranks

    def minimum(kind: str) -> int:
        if kind == "encoder":
            return CUDA_CONTEXT_BYTES + weights + _ACTIVATION_BYTES
        kv = (config.pd.kv_memory or _MIN_KV_BYTES) // ranks["pd"]
        share = weights // ranks["pd"] if kind == "pd" else weights
        return CUDA_CONTEXT_BYTES + share + _ACTIVATION_BYTES + config.pd.embedding_memory + kv

    return [
        Need(name, given or minimum(kind), grows=kind != "encoder" and not given, ranks=ranks[kind])
        for name, kind in config.counts.kinds.items()
    ]
