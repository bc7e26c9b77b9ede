"""The rule for work that may have ended its workers: a request at PD workers, an item at encoders. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: Workers that may be lost with the same work present; at the last of them it is alone.
MAX_LOSSES = 3


@dataclass(frozen=True, slots=True)
class _Loss:
    address: str
    incarnation: str
    final: bool


class LossRecord:
    """The workers that ended with one piece of work in them, since it last succeeded.

    Present at two losses it is a suspect, which runs alone; the worker that is then lost is its fault. What
    shares a worker with others is never blamed.
    """

    __slots__ = ("_losses",)

    def __init__(self) -> None:
        self._losses: tuple[_Loss, ...] = ()

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def suspect(self) -> bool:
        """Whether the work may only run alone."""
        return len(self._losses) >= MAX_LOSSES - 1

    @property
    def addresses(self) -> set[str]:
        """Where workers were lost."""
        return {loss.address for loss in self._losses}

    def add(self, address: str, incarnation: str = "", *, alone: bool, final: bool = True) -> bool:
        """Whether this loss is the work's fault. `final`: nothing seen later can show that the process lived
        on undisturbed."""
        before = self._losses if alone else self._losses[-(MAX_LOSSES - 2) :]
        self._losses = (*before, _Loss(address, incarnation, final))
        return alone

    def withdraw(self, incarnation: str) -> None:
        """The process never ended, only its connection was lost: the work is not suspected for that."""
        self._losses = tuple(loss for loss in self._losses if loss.final or loss.incarnation != incarnation)
