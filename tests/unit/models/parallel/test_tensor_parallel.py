"""A rank's place in its group; the collectives run between processes in `test_layers.py`."""

from __future__ import annotations

import pytest

from triptych.models.parallel.tensor_parallel import TensorParallel


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_its_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"no rank {rank} of {size}"):
        TensorParallel(rank, size)
