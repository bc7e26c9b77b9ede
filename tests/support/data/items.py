"""Items with made-up bytes, for tests of the store and the connector."""

from __future__ import annotations

import hashlib
import random

from triptych.base.types import DTYPE_BYTES, ItemPlan

NAMESPACE = "0123456789abcdef" * 4


def make_plan(
    name: str = "item", *, rows: int = 7, width: int = 32, dtype: str = "float32", namespace: str = NAMESPACE
) -> ItemPlan:
    """A plan whose mm_hash follows from `name`."""
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    return ItemPlan(
        mm_hash=mm_hash,
        namespace=namespace,
        modality="image",
        rows=rows,
        width=width,
        dtype=dtype,
        length=rows,
        grid_thw=(1, 2, 14),
    )


def bare_plan(key: str, rows: int = 1, width: int = 1) -> ItemPlan:
    """A plan of the namespace `n` whose mm_hash is the key itself."""
    return ItemPlan(key, "n", "image", rows, width, "float32", rows)


def make_body(plan: ItemPlan, seed: int = 0) -> bytes:
    """`plan.nbytes` random bytes."""
    assert plan.nbytes % DTYPE_BYTES[plan.dtype] == 0
    return random.Random(f"{plan.mm_hash}{seed}").randbytes(plan.nbytes)


def fresh_buffer(nbytes: int) -> memoryview:
    """A buffer to load into."""
    return memoryview(bytearray(nbytes))
