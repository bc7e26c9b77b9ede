"""The pool of shared memory: what it frees leaves neither memory nor a descriptor."""

from __future__ import annotations

import os

import pytest

from triptych.ec_connector.connectors.segments import SegmentPool


def test_a_pool_that_closes_frees_what_is_not_in_use() -> None:
    pool = SegmentPool(1 << 20)
    used, kept = pool.acquire(1), pool.acquire(1)
    assert used is not None and kept is not None
    pool.release(kept)
    pool.close()
    assert kept.memory.closed
    with pytest.raises(OSError):
        os.fstat(kept.fd)
    assert pool.nbytes == used.size and os.fstat(used.fd).st_size == used.size
    used.close()


def test_what_is_kept_makes_room_for_what_does_not_fit_it() -> None:
    pool = SegmentPool(1 << 20)
    small = pool.acquire(1)
    assert small is not None
    pool.release(small)
    large = pool.acquire(1 << 20)
    assert large is not None and small.memory.closed
    assert pool.nbytes == large.size
    large.close()
