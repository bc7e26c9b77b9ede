"""Capacity of the configured memory in KV blocks, and whether the longest request fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

from triptych.base.config import PDConfig, format_size
from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device
from triptych.models.base import DecoderSide
from triptych.models.checkpoint.first_checks import check_length
from triptych.models.geometry import CrossGeometry, DecoderGeometry
from triptych.pd_worker.attention.attention import backend_on
from triptych.pd_worker.core.admission import CrossLimits

#: A quarter goes to recurrent states: of the memory left for states and KV cache (without --state-memory),
#: of the states' memory to snapshots, and of --swap-memory to swapped states.
_PART = 4
#: A snapshot for each running request is enough for equal prompts.
_SLOTS_PER_REQUEST = 2


@dataclass(frozen=True, slots=True)
class StateCapacity:
    """Slots of running requests, snapshots beside them on the device, and host slots of swapped requests."""

    slots: int
    snapshots: int
    host_slots: int


def state_capacity(config: PDConfig, geometry: DecoderGeometry) -> StateCapacity | None:
    """The slots of this decoder; None without recurrent layers. ConfigError where not even one fits."""
    if not (nbytes := geometry.slot_bytes):
        return None
    total = config.states_memory // nbytes
    if not total:
        raise ConfigError(
            f"--state-memory {format_size(config.states_memory)} holds no state of this model's recurrent "
            f"layers: raise it to {format_size(nbytes)} or more for each request that runs at once"
        )
    slots = min(config.max_num_seqs, total - total // _PART if config.prefix_caching else total)
    swapping = config.preemption == "swap"
    host = min(slots, config.swap_memory // _PART // nbytes) if swapping else 0
    if swapping and not host:
        raise ConfigError(
            f"a quarter of --swap-memory {format_size(config.swap_memory)} holds no state of "
            f"{format_size(nbytes)}: raise it, or leave out --preemption swap"
        )
    return StateCapacity(slots, total - slots if config.prefix_caching else 0, host)


def auto_states(left: int, geometry: DecoderGeometry, max_num_seqs: int) -> int:
    """Bytes for states, of `left` for them and the KV cache; at least one slot, at most what is of use."""
    nbytes = geometry.slot_bytes
    return max(nbytes, min(left // _PART, _SLOTS_PER_REQUEST * max_num_seqs * nbytes))


#: Above this a default would ask for more memory than most machines give.
_DEFAULT_MAX_MODEL_LEN = 32768


class RunnerOptions(TypedDict):
    """What a model runner is built with, besides its decoder."""

    num_blocks: int
    block_size: int
    backend: str
    num_host_blocks: int
    spare_block: bool
    num_slots: int
    num_host_slots: int


def runner_options(config: PDConfig, decoder: DecoderSide) -> RunnerOptions:
    """The options of this decoder's runner; ConfigError for what its memory cannot hold."""
    states = state_capacity(config, decoder.geometry)
    return RunnerOptions(
        num_blocks=num_kv_blocks(config, decoder.geometry, decoder.dtype),
        block_size=config.block_size,
        backend=backend_on(decoder.device, config.attention_backend),
        num_host_blocks=num_host_blocks(config, decoder.geometry, decoder.dtype),
        spare_block=uses_graphs(config, decoder.device, decoder.geometry),
        num_slots=0 if states is None else states.slots + states.snapshots,
        num_host_slots=0 if states is None else states.host_slots,
    )


def max_model_len(config: PDConfig, geometry: DecoderGeometry, dtype: torch.dtype) -> int:
    """Longest prompt plus output in tokens; ConfigError above what the checkpoint's positions allow.

    Where the flag says none: the checkpoint's, up to a limit, and no more than --kv-memory holds, if that is
    known yet.
    """
    limit = geometry.max_position_embeddings
    check_length(config.max_model_len, limit)
    if config.max_model_len or not config.kv_memory:
        return longest_request(config, geometry)
    held = config.kv_memory // block_bytes(geometry, config.block_size, dtype) * config.block_size
    # At least a block, so that a memory that holds none is an error with its sum.
    return min(longest_request(config, geometry), max(held, config.block_size))


def longest_request(config: PDConfig, geometry: DecoderGeometry) -> int:
    """--max-model-len, or its default where memory is no limit."""
    return config.max_model_len or min(geometry.max_position_embeddings, _DEFAULT_MAX_MODEL_LEN)


def block_bytes(geometry: DecoderGeometry, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers."""
    return geometry.token_elements * block_size * dtype.itemsize


def num_kv_blocks(config: PDConfig, geometry: DecoderGeometry, dtype: torch.dtype) -> int:
    """Blocks in --kv-memory; ConfigError, with the sum, when one longest request does not fit."""
    nbytes = block_bytes(geometry, config.block_size, dtype)
    longest = max_model_len(config, geometry, dtype)
    need = -(-longest // config.block_size)
    if config.kv_memory // nbytes < need:
        of_rank = ", a rank's share," if config.tensor_parallel > 1 else ""
        raise ConfigError(
            f"--kv-memory {format_size(config.kv_memory)}{of_rank} holds no request of --max-model-len "
            f"{longest}: {need} blocks of {config.block_size} tokens x {format_size(nbytes)} = "
            f"{format_size(need * nbytes)}; raise --kv-memory or lower --max-model-len"
        )
    return config.kv_memory // nbytes


def uses_graphs(config: PDConfig, device: torch.device, geometry: DecoderGeometry | None = None) -> bool:
    """Whether steps of decodes alone run as graphs, by --decode-graphs.

    ConfigError for CUDA graphs of several ranks, whose collectives no graph has been captured with, of
    attention that gathers, and of recurrent layers.
    """
    mode, ranks = config.decode_graphs, config.tensor_parallel
    if geometry is not None and geometry.states:
        if mode in ("static", "cuda"):
            raise ConfigError(f"--decode-graphs {mode} does not go with recurrent layers: leave it out")
        return False
    if ranks > 1 and mode == "cuda":
        raise ConfigError(
            f"--decode-graphs cuda and --tensor-parallel {ranks} do not go together: use "
            "--decode-graphs off, or one rank"
        )
    if ranks > 1 and mode == "auto":
        return False
    if config.attention_backend == "sdpa" and mode == "cuda":
        raise ConfigError(
            "--decode-graphs cuda and --attention-backend sdpa do not go together: it would gather "
            "--max-model-len tokens of every sequence; use --attention-backend auto"
        )
    captures = Device.of(device).captures and config.attention_backend in ("auto", "triton")
    return mode in ("static", "cuda") or (mode == "auto" and captures)


def num_host_blocks(config: PDConfig, geometry: DecoderGeometry, dtype: torch.dtype) -> int:
    """Blocks in --swap-memory; 0 where preempted requests are recomputed, ConfigError where none fits."""
    if config.preemption != "swap":
        return 0
    states = state_capacity(config, geometry)
    memory = config.swap_memory - (0 if states is None else states.host_slots * geometry.slot_bytes)
    nbytes = block_bytes(geometry, config.block_size, dtype)
    if memory < nbytes:
        raise ConfigError(
            f"--swap-memory {format_size(config.swap_memory)} holds no KV block of {format_size(nbytes)}: "
            "raise it, or leave out --preemption swap"
        )
    return memory // nbytes


def cross_limits_of(
    config: PDConfig, cross: CrossGeometry, num_blocks: int, longest: int, *, whole: bool
) -> CrossLimits:
    """Limits on a request's encoder output.

    `whole`: every output has all of the encoder's positions. ConfigError, with the sum, when one of them and
    `longest` tokens do not fit.
    """
    limits = CrossLimits(cross.width, cross.max_rows, num_blocks, config.block_size)
    need = -(-(cross.max_rows or 0) // config.block_size) - (-longest // config.block_size)
    if whole and need > num_blocks:
        raise ConfigError(
            f"--kv-memory {format_size(config.kv_memory)} holds {num_blocks} blocks of {config.block_size}, "
            f"but {cross.max_rows} encoder positions and --max-model-len {longest} need {need}: raise "
            "--kv-memory or lower --max-model-len"
        )
    return limits
