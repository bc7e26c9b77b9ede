"""Events of PD workers, as a proxy's requests get them."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.protos.pd_pb2 import Admitted, Finished, ItemLoaded, ItemMissing, ItemPlacement
from triptych.proxy.events import WorkerEvent


def pd_admitted(attempt: int, ids: Sequence[int], places: Sequence[tuple[int, int]] = ()) -> WorkerEvent:
    placements = [ItemPlacement(offset=offset, length=length) for offset, length in places]
    return WorkerEvent(attempt=attempt, admitted=Admitted(prompt_token_ids=ids, placements=placements))


def pd_loaded(attempt: int, key: str, seconds: float = 0.0, path: str = "") -> WorkerEvent:
    return WorkerEvent(attempt=attempt, item_loaded=ItemLoaded(mm_hash=key, seconds=seconds, path=path))


def pd_missing(attempt: int, key: str, digest: str = "") -> WorkerEvent:
    return WorkerEvent(attempt=attempt, item_missing=ItemMissing(mm_hash=key, damaged_digest=digest))


def pd_finished(
    attempt: int,
    prompt: int,
    completion: int,
    cached: int = 0,
    *,
    reason: str = "stop",
    prefill: float = 0.0,
    decode: float = 0.0,
    work: float = 0.0,
) -> WorkerEvent:
    end = Finished(
        reason=reason,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        prefill_seconds=prefill,
        decode_seconds=decode,
        work_seconds=work,
    )
    return WorkerEvent(attempt=attempt, finished=end)
