"""Packing of a batch's items into graph replays. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.errors import ConfigError


def token_budgets(minimum: int, maximum: int, multiple: int = 1) -> tuple[int, ...]:
    """Budgets from `minimum` on, each twice the one before, then `maximum`, rounded down to a multiple.

    `minimum` is a multiple; it is a budget even where `maximum` is below it, so that one item has a graph.
    """
    maximum = max(minimum, maximum - maximum % multiple)
    budgets = [minimum]
    while budgets[-1] * 2 < maximum:
        budgets.append(budgets[-1] * 2)
    return (*budgets, maximum) if budgets[-1] < maximum else tuple(budgets)


def parse_budgets(text: str, multiple: int = 1) -> tuple[int, ...]:
    """The budgets of --encoder-graph-budgets, ascending; ConfigError for what is none."""
    try:
        budgets = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--encoder-graph-budgets {text}: give numbers of output rows separated by commas, like 256,512"
        ) from None
    wrong = next((budget for budget in budgets if budget < 1 or budget % multiple), None)
    if wrong is not None:
        raise ConfigError(
            f"--encoder-graph-budgets {text}: {wrong} is no multiple of {multiple}, the rows of one item of "
            f"this model: give multiples, like {multiple},{2 * multiple}"
            if wrong > 0
            else f"--encoder-graph-budgets {text}: {wrong} is below 1: a budget is a number of output rows"
        )
    return tuple(sorted(set(budgets)))


def smallest_fitting(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of the ascending budgets that is at least `tokens`; None if all are smaller."""
    return next((budget for budget in budgets if budget >= tokens), None)


@dataclass(frozen=True, slots=True)
class ItemSize:
    """The size of one item: output rows, and frames (a picture is one)."""

    tokens: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The captured budgets, ascending, and the most items and frames of one replay."""

    budgets: tuple[int, ...]
    max_batch_size: int
    max_frames_per_batch: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The items of one replay, by their index, and the budget that is replayed."""

    budget: int
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """All items of a batch: those of each replay, and those above a limit, which are encoded eagerly."""

    batches: tuple[PackedBatch, ...]
    eager: tuple[int, ...]


def pack(sizes: Sequence[ItemSize], limits: GraphLimits) -> Packing:
    """Greedy packing, smallest items first, with cliff deferral.

    An item goes into the open replay while that stays within all limits. It is deferred to the next one where
    two replays compute fewer rows: where its budget alone and the open one are less than their sum needs
    (rows 200 and 100 with budgets 128, 256 and 512: 256 + 128, not 512). So no packing costs more rows than
    each item by itself.
    """
    eager = [index for index, size in enumerate(sizes) if not _fits([size], limits)]
    packed = sorted(set(range(len(sizes))) - set(eager), key=lambda index: (sizes[index].tokens, index))
    batches: list[list[int]] = []
    for index in packed:
        if batches and _joins([sizes[i] for i in batches[-1]], sizes[index], limits):
            batches[-1].append(index)
        else:
            batches.append([index])
    done = [PackedBatch(_budget([sizes[i] for i in batch], limits), tuple(batch)) for batch in batches]
    return Packing(tuple(done), tuple(eager))


def _joins(batch: list[ItemSize], item: ItemSize, limits: GraphLimits) -> bool:
    together = [*batch, item]
    if not _fits(together, limits):
        return False
    return _budget(together, limits) <= _budget(batch, limits) + _budget([item], limits)


def _fits(batch: list[ItemSize], limits: GraphLimits) -> bool:
    return (
        len(batch) <= limits.max_batch_size
        and sum(size.frames for size in batch) <= limits.max_frames_per_batch
        and sum(size.tokens for size in batch) <= limits.budgets[-1]
    )


def _budget(batch: list[ItemSize], limits: GraphLimits) -> int:
    budget = smallest_fitting(limits.budgets, sum(size.tokens for size in batch))
    assert budget is not None, "what does not fit is not packed"
    return budget
