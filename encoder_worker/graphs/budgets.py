"""Token budgets: the output rows of the graphs that a worker captures. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.base.errors import ConfigError


def token_budgets(least: int, most: int, multiple: int = 1) -> tuple[int, ...]:
    """Budgets from `least` on, each twice the one before, and then `most`, rounded down to a multiple.

    `least` is a multiple; it is a budget even where `most` is below it, so that one item has a graph.
    """
    most = max(least, most - most % multiple)
    budgets = [least]
    while budgets[-1] * 2 < most:
        budgets.append(budgets[-1] * 2)
    return (*budgets, most) if budgets[-1] < most else tuple(budgets)


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
    """The smallest of the ascending budgets with room for so many rows; None: there is none."""
    return next((budget for budget in budgets if budget >= tokens), None)
