"""Memory plan of a PD worker: what it needs, and what is left for the KV cache (--kv-memory auto)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.base.config import MIB, format_size
from triptych.base.errors import ConfigError

#: One eighth of the free memory is for embeddings: they are resident until their rows are prefilled, keys
#: and values until the last token.
EMBEDDING_PART = 8
MIN_EMBEDDINGS = 64 * MIB


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """Bytes that a worker takes of its device's memory beside keys and values.

    `held` are weights and libraries, measured; `activations` the maximum that a step takes above them,
    measured; `gathered` copies of keys and values in one layer, and its masks. `block` is one KV block,
    `max_kv` what the limits on requests can use. `graphs` is what decode graphs keep, `states` what recurrent
    layers do, `shared` blocks on their way to and from the store. `host` are buffers beside all that, in the
    machine's memory; with `copies_on_host` those of embeddings are in it too.
    """

    held: int
    activations: int
    gathered: int
    embeddings: int
    swapped: int
    block: int
    max_kv: int
    graphs: int = 0
    states: int = 0
    shared: int = 0
    host: int = 0
    copies_on_host: bool = False

    def with_embeddings(self, nbytes: int) -> WorkerNeeds:
        """The same with so many bytes for embeddings; on an accelerator their copies are the host's."""
        return replace(self, embeddings=nbytes, host=self.host + nbytes if self.copies_on_host else self.host)

    @property
    def fixed(self) -> int:
        working = self.activations + self.gathered + self.graphs
        return self.held + working + self.embeddings + self.states + self.swapped + self.shared


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory budget of a worker and its parts."""

    budget: int
    needs: WorkerNeeds
    kv_memory: int

    @property
    def rest(self) -> int:
        return self.budget - self.needs.fixed - self.kv_memory

    def table(self) -> str:
        """One line per part, for logs and errors."""
        needs = self.needs
        parts = (
            ("weights and libraries", needs.held),
            ("activations of the longest batch", needs.activations),
            ("keys, values and masks of a layer", needs.gathered),
            ("decode graphs (--decode-graphs)", needs.graphs),
            ("embeddings (--encoder-cache-memory)", needs.embeddings),
            ("states of recurrent layers (--state-memory)", needs.states),
            ("swapped blocks (--swap-memory)", needs.swapped),
            ("shared blocks (--share-memory)", needs.shared),
            ("KV cache (--kv-memory)", self.kv_memory),
            ("rest", self.rest),
            ("of this worker (--device-memory)", self.budget),
            ("buffers of the host, beside that", needs.host),
        )
        lines = [(name, nbytes) for name, nbytes in parts if nbytes]
        width = max(len(name) for name, _ in lines)
        sign = ("", "-")
        return "\n".join(
            f"  {name:<{width}}  {sign[nbytes < 0] + format_size(abs(nbytes)):>12}" for name, nbytes in lines
        )


def auto_embeddings(left: int, max_use: int) -> int:
    """Bytes for embeddings, of `left` for them and the KV cache; `max_use`: what requests can use."""
    return max(MIN_EMBEDDINGS, min(left // EMBEDDING_PART, max_use))


def plan_worker_memory(
    budget: int, needs: WorkerNeeds, kv_memory: int = 0, *, host_free: int = 0
) -> WorkerMemory:
    """`kv_memory`, or what `budget` leaves for it, at most what requests can use, in whole blocks.

    `host_free` bytes are left of the machine's memory. ConfigError, with the table, where the KV memory is
    less than a block, or something more than there is.
    """
    plan = WorkerMemory(budget, needs, kv_memory or _left(budget, needs))
    if needs.host > host_free:
        raise ConfigError(
            f"buffers of the host need {format_size(needs.host)} and {format_size(host_free)} are available: "
            f"lower --encoder-cache-memory, --swap-memory or --share-memory\n{plan.table()}"
        )
    if plan.kv_memory < needs.block:
        raise ConfigError(
            f"nothing is left for the KV cache, of which a block is {format_size(needs.block)}: raise "
            f"--device-memory, or lower --max-model-len, --max-num-batched-tokens or "
            f"--encoder-cache-memory\n{plan.table()}"
        )
    if plan.rest < 0:
        raise ConfigError(
            f"this worker needs {format_size(budget - plan.rest)} and has {format_size(budget)}: lower "
            f"--kv-memory or leave it out, or raise --device-memory\n{plan.table()}"
        )
    return plan


def _left(budget: int, needs: WorkerNeeds) -> int:
    return max(0, min(budget - needs.fixed, needs.max_kv)) // needs.block * needs.block
