"""How the items of a batch are divided among ranks. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence


def divide(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank its items' indices, ascending: largest items first, each to the rank with the least cost.

    No rank has more than an equal share of the sum plus one item, nor more than 4/3 of what the best division
    gives the busiest. Ranks come in order: with fewer items than ranks, the last ones have none.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += max(costs[index], 1)
    return [sorted(share) for share in shares]


def calls(costs: Sequence[int], limit: int) -> list[range]:
    """The calls of the tower for a share of these costs: neighbours up to `limit`, a larger item alone.

    Memory is measured for one such call (`--encoder-batch-patches`).
    """
    found: list[range] = []
    begin, cost = 0, 0
    for index, each in enumerate(costs):
        if index > begin and cost + each > limit:
            found.append(range(begin, index))
            begin, cost = index, 0
        cost += each
    return [*found, range(begin, len(costs))] if costs else found
