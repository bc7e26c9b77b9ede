"""The decisions of Kubernetes' controllers, as pure functions: rolling updates, evictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod that is not terminating, as its controller sees it; `age` counts up from the oldest."""

    name: str
    current: bool
    ready: bool
    age: int


@dataclass(frozen=True, slots=True)
class PodChanges:
    """How many pods of the current revision to create, and which pods to delete."""

    create: int = 0
    delete: tuple[str, ...] = ()


def share(value: int | str, of: int, *, up: bool) -> int:
    """A number, or a percentage of `of`, rounded."""
    if isinstance(value, int):
        return value
    part = of * float(value.rstrip("%")) / 100
    return math.ceil(part) if up else math.floor(part)


def deployment_changes(
    pods: Sequence[PodView], desired: int, surge: int | str, unavailable: int | str
) -> PodChanges:
    """The next step of a RollingUpdate: at most `surge` pods more than desired, `unavailable` ready fewer.

    Pods that terminate do not count, neither here nor in Kubernetes.
    """
    most_more, most_fewer = share(surge, desired, up=True), share(unavailable, desired, up=False)
    if most_more == most_fewer == 0:
        most_fewer = 1
    new = [pod for pod in pods if pod.current]
    if create := max(0, min(desired - len(new), desired + most_more - len(pods))):
        return PodChanges(create)
    if len(new) > desired:
        # Scaled down: those that are not ready first, then the youngest.
        surplus = sorted(new, key=lambda pod: (pod.ready, -pod.age))[: len(new) - desired]
        return PodChanges(0, tuple(pod.name for pod in surplus))
    return PodChanges(0, tuple(_replaced(pods, desired - most_fewer)))


def _replaced(pods: Sequence[PodView], least: int) -> list[str]:
    """Old pods to delete now, where `least` have to stay ready."""
    starting = sum(pod.current and not pod.ready for pod in pods)
    if len(pods) - least - starting <= 0:
        return []
    old = sorted((pod for pod in pods if not pod.current), key=lambda pod: pod.age)
    broken = [pod.name for pod in old if not pod.ready][: len(pods) - least - starting]
    spare = max(0, sum(pod.ready for pod in pods) - least)
    return broken + [pod.name for pod in old if pod.ready][:spare]


def stateful_changes(pods: Sequence[PodView], names: Sequence[str]) -> PodChanges:
    """The next step of a StatefulSet's RollingUpdate: what is missing is created, else one old pod goes.

    The highest ordinal goes first, and only while all others are ready.
    """
    present = {pod.name for pod in pods}
    if surplus := [pod.name for pod in pods if pod.name not in names]:
        return PodChanges(0, tuple(surplus[-1:]))
    if missing := [name for name in names if name not in present]:
        return PodChanges(len(missing))
    old = [pod for pod in pods if not pod.current]
    broken = [pod for pod in old if not pod.ready]
    if broken:
        return PodChanges(0, (broken[-1].name,))
    if old and all(pod.ready for pod in pods):
        return PodChanges(0, (max(old, key=lambda pod: names.index(pod.name)).name,))
    return PodChanges()


def evictions_allowed(expected: int, healthy: int, most_gone: int | str) -> int:
    """How many of a PodDisruptionBudget's pods may be evicted now; `most_gone` is its maxUnavailable."""
    return max(0, healthy - expected + share(most_gone, expected, up=True))
