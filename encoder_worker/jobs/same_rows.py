"""Rows of equal frames: those of one video's segment in the store serve another's without the tower."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import torch

from triptych.base.hashing import framed_digest
from triptych.base.log import short
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.models.base import PreparedItem
from triptych.store import keys
from triptych.store.bulk import Loaded
from triptych.store.control import NOTE, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

#: How long the store may take before the tower computes.
SECONDS = 2.0


def content_key(plan: ItemPlan, prepared: PreparedItem, salt: str) -> str:
    """The digest of all that an item's rows depend on: the tower and its inputs, within one tenant."""
    fields: list[tuple[str, bytes | memoryview]] = [
        ("domain", b"triptych.same_rows.v1"),
        ("namespace", plan.namespace.encode()),
        ("salt", salt.encode()),
        ("rows", str(plan.rows).encode()),
    ]
    for name, tensor in sorted(prepared.tensors.items()):
        shape = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        data = tensor.contiguous().flatten().view(torch.uint8).numpy()
        fields += [("tensor", shape.encode()), ("data", data.data)]
    return framed_digest(fields)


class SameRows:
    """Finds rows by the content of prepared items. Entries live `ttl` seconds, as embeddings do."""

    def __init__(self, store: EmbeddingStore, ttl: float) -> None:
        self._store = store
        self._milliseconds = int(ttl * 1000)

    async def output(self, plan: ItemPlan, prepared: PreparedItem, salt: str) -> EncoderOutput | None:
        """The output of an item with the same content, as this item's; None where it has to be computed."""
        try:
            content = await asyncio.to_thread(content_key, plan, prepared, salt)
            async with asyncio.timeout(SECONDS):
                other = await self._other(keys.same_rows(content), plan)
                return None if other is None else await self._loaded(plan, other)
        except (StoreUnavailable, TimeoutError):
            return None
        except Exception:
            # The job is still to be done.
            logger.exception("equal rows of %s could not be looked up", short(plan.mm_hash))
            return None

    async def _other(self, key: str, plan: ItemPlan) -> ItemPlan | None:
        """The stored item of equal content; this one is noted where there is none."""
        hash_of_rows = await self._store.control.script(NOTE, [key], plan.mm_hash, self._milliseconds, 0)
        if hash_of_rows is None:
            return None
        (other,) = await self._store.look_up([(hash_of_rows.decode(), plan.namespace)])
        if other is None or (other.rows, other.width, other.dtype) != (plan.rows, plan.width, plan.dtype):
            await self._store.control.script(NOTE, [key], plan.mm_hash, self._milliseconds, 1)
            return None
        return other

    async def _loaded(self, plan: ItemPlan, other: ItemPlan) -> EncoderOutput | None:
        memory = np.empty(other.nbytes, dtype=np.uint8)
        result = await self._store.load(other, lambda nbytes: memory.data)
        if not isinstance(result, Loaded):
            return None
        rows = torch.from_numpy(memory).view(getattr(torch, plan.dtype)).view(plan.rows, plan.columns)
        return EncoderOutput(plan, rows)
