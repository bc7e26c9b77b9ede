"""The tensor-parallel group of a worker, and its collectives: all-reduce, and gather to rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from triptych.base.errors import TriptychError


class CollectiveError(TriptychError):
    """A collective that failed, since another rank died, or did not come to it within the group's timeout.

    The ranks no longer agree about what was sent: the worker has to end.
    """


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among the `size` ranks of a torch.distributed process group.

    The group's timeout is the deadline of every collective: give it to `init_process_group` or `new_group`.
    `group` None is the default group. All ranks call the collectives in the same order.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} of {self.size}")

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `partial`, bit for bit the same on every rank; `partial` may be overwritten.

        On a CPU half-precision numbers are added in float32: what is rounded once is nearer to one rank's.
        """
        low = partial.device.type == "cpu" and partial.dtype.itemsize < 4
        total = partial.float() if low else partial.contiguous()
        with self._named("all-reduce"):
            dist.all_reduce(total, group=self.group)
        return total.to(partial.dtype)

    def all_reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        """The least of all ranks' `values`, element by element; `values` are overwritten."""
        with self._named("all-reduce"):
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.group)
        return values

    def gather(self, columns: torch.Tensor, counts: list[int]) -> torch.Tensor | None:
        """On rank 0 all ranks' columns side by side, [N, sum of counts]; None on the others.

        Rank r gives `columns` [N, counts[r]]; what is sent is padded to the widest.
        """
        widest = max(counts)
        sent = functional.pad(columns, (0, widest - columns.shape[-1])).contiguous()
        parts = [torch.empty_like(sent) for _ in counts] if self.rank == 0 else None
        with self._named("gather"):
            dist.gather(sent, parts, group=self.group, group_dst=0)
        if parts is None:
            return None
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], dim=-1)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(f"{what} of rank {self.rank} of {self.size} failed: {error}") from error
