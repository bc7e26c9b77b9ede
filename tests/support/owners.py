"""Owners of items: the classes of ours that have an mm_hash in what they change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import chain
from typing import Any


def attributes(thing: object) -> Iterator[Any]:
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield getattr(thing, name)


def parts(container: object) -> Iterable[Any]:
    """What stands in a container; nothing where it is none."""
    if isinstance(container, Mapping):
        return chain(container.keys(), container.values())
    return container if isinstance(container, list | tuple | Set | deque) else ()


def names_one(container: object, keys: set[str]) -> bool:
    return any(part in keys if isinstance(part, str) else names_one(part, keys) for part in parts(container))


def owners(root: object, keys: set[str], *, without: object = None) -> set[str]:
    """The classes of ours, reachable from `root`, that have one of the keys in a mutable container.

    `without`: a store that is in this process.
    """
    classes: set[str] = set()
    seen: dict[int, object] = {id(without): without}
    left = [root]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        left += parts(thing)
        if type(thing).__module__.startswith("triptych."):
            for value in (value for value in attributes(thing) if value is not without):
                left.append(value)
                if not isinstance(value, tuple | frozenset) and names_one(value, keys):
                    classes.add(type(thing).__name__)
    return classes
