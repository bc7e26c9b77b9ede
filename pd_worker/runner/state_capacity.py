"""Capacity of --state-memory and --swap-memory in states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.config import PDConfig, format_size
from triptych.base.errors import ConfigError
from triptych.models.base import DecoderGeometry

#: One part in so many: of what is left for states and KV cache, the states' where no flag says it; of the
#: states' memory, the snapshots'; of --swap-memory, the states'.
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
