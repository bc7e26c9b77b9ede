"""Live data as JSON: the snapshot of the cluster, its history, and the record of one request.

None of it holds a prompt, an output, a media URL, a key, a tenant's name or an `mm_hash`.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec

from triptych.base.machine.worker_load import GpuLoad

#: Longest short address.
_MAX_ADDRESS = 32


class ProxyState(msgspec.Struct, frozen=True):
    """This proxy. `in_flight`: calls' choices that have not ended; `queued`: those at no PD worker yet."""

    id: str
    draining: bool
    in_flight: int
    queued: int
    max_queue: int
    memory_bytes: int


class StoreState(msgspec.Struct, frozen=True):
    """The embedding store, as it was last asked; `max_bytes` 0: it has no limit."""

    up: bool
    used_bytes: int = 0
    max_bytes: int = 0
    evictions: int = 0


class _WorkerRow(msgspec.Struct, frozen=True):
    """What workers of both pools have. `busy` (the share of the last ten seconds in which the engine worked),
    memory and GPU are the worker's own report, None without one."""

    name: str
    address: str
    model: str
    kind: str
    state: str
    reason: str
    busy: float | None
    memory_bytes: int | None
    gpu: GpuLoad | None


class EncoderState(_WorkerRow, frozen=True):
    """One encoder worker; `jobs`, `work_seconds`, `done` and `encode_ms` are of this proxy's jobs."""

    jobs: int
    work_seconds: float
    done: int
    encode_ms: float | None


class PDWorkerState(_WorkerRow, frozen=True):
    """One PD worker. `requests` are this proxy's, `role` is "both", "prefill" or "decode"; the rest is the
    worker's own report, None without one."""

    requests: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    cache_usage: float | None
    tokens_per_second: float
    role: str = "both"


class PoolScaling(msgspec.Struct, frozen=True):
    """Workers that a pool has and should have; `desired` None: no autoscaler decides."""

    live: int
    desired: int | None = None
    reason: str = ""


class PoolsScaling(msgspec.Struct, frozen=True):
    """Both pools."""

    encoder: PoolScaling
    pd: PoolScaling


class ClusterRates(msgspec.Struct, frozen=True):
    """Events of a second, over the last ten; `tokens` of all PD workers, the rest of this proxy.

    `errors` are replies with 5xx or 429, `refused` those with any other 4xx. `hit_rate`: the share of the
    last minute's items that needed no encoder job of their own; None where there was none. `hits` are these
    items, `saved_seconds` what encoder workers would have taken for them, by the mean of their last ones.
    """

    requests: float
    tokens: float
    items: float
    errors: float
    refused: float
    hit_rate: float | None
    hits: int = 0
    saved_seconds: float | None = None


class Flow(msgspec.Struct, frozen=True):
    """Embeddings of this proxy's requests that went one way in a second, over the last ten."""

    items: float
    bytes: float


class ClusterGoodput(msgspec.Struct, frozen=True):
    """Calls of the last minute against the SLO, in seconds; None where there was none."""

    ttft_slo: float
    tpot_slo: float
    met: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    tpot_p99: float | None = None


class RequestRow(msgspec.Struct, frozen=True):
    """One call in flight. `id` is drawn for this row: nothing else bears it."""

    id: str
    model: str
    age: float
    stage: str
    items: int
    items_ready: int
    tokens: int
    pd_worker: str
    attempt: int


class FinishedQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a list of calls that have ended; `failed`: only those with a status of 400 or more."""

    order: Literal["newest", "slowest"] = "newest"
    failed: bool = False
    model: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 32


class FinishedRow(msgspec.Struct, frozen=True):
    """One call that has ended, at the time of day `ended`. `id` is drawn for this row.

    `media_tokens`: of the prompt, those that its distinct items take.
    """

    id: str
    model: str
    ended: float
    seconds: float
    ttft: float | None
    status: int
    items: int
    tokens: int
    pd_worker: str
    media_tokens: int = 0


class FinishedRequests(msgspec.Struct, frozen=True):
    """Calls that have ended, in the order that was asked for; `models` are all that the kept ones name."""

    requests: list[FinishedRow]
    models: list[str]


class FailureRow(msgspec.Struct, frozen=True):
    """A failure in plain words; `count`: how often it came since it was first seen, `time` is of the last."""

    time: float
    what: str
    remedy: str
    where: str = ""
    count: int = 1


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """The cluster as one proxy sees it now. `flows`: embeddings "encoded" and saved by encoder workers, and
    loaded by PD workers from the "store", by shared memory ("shm"), or from the encoder worker ("peer")."""

    time: float
    version: str
    uptime: float
    proxy: ProxyState
    proxies: int
    store: StoreState
    models: list[str]
    encoders: list[EncoderState]
    pd_workers: list[PDWorkerState]
    scaling: PoolsScaling
    rates: ClusterRates
    flows: dict[str, Flow]
    goodput: ClusterGoodput
    requests: list[RequestRow]
    failures: list[FailureRow]


class ClusterSeries(msgspec.Struct, frozen=True):
    """Equally many points of each series, oldest first; None where nothing is known."""

    in_flight: list[float | None]
    queued: list[float | None]
    requests: list[float | None]
    tokens: list[float | None]
    items: list[float | None]
    errors: list[float | None]
    hit_rate: list[float | None]
    met: list[float | None]
    encoders: list[float | None]
    desired_encoders: list[float | None]
    pd_workers: list[float | None]
    kv_usage: list[float | None]
    encoder_busy: list[float | None]
    pd_busy: list[float | None]


class ClusterHistory(msgspec.Struct, frozen=True):
    """The last hour; `end` is the last point's time, `step` the seconds between two."""

    step: int
    end: float
    series: ClusterSeries


class StageSpan(msgspec.Struct, frozen=True):
    """A stage of a request, in seconds since its arrival. `item`: index of the item it is about.

    `awaits`: of a request's wait for an item, the stage that this item is in.
    """

    name: str
    start: float
    end: float
    where: str
    item: int | None = None
    note: str = ""
    attempt: int = 0
    awaits: str = ""


class Waterfall(msgspec.Struct, frozen=True):
    """Where one call's time went.

    Spans without an item follow each other without gap or overlap from 0 to its end; those with an item lie
    beside them. `seconds` and `status` are None while it is in flight. `media_tokens`: those of the prompt
    that its distinct items take. `titles` are those of the first items
    by their index, empty where an item has none.
    """

    id: str
    model: str
    started: float
    seconds: float | None
    status: int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    choices: int
    attempts: int
    items: int
    spans: list[StageSpan]
    titles: list[str] = []
    media_tokens: int = 0


def short_address(address: str) -> str:
    """A worker's address for a narrow column: of a host's name the first label, of a path its last part."""
    if "/" in address:
        return address.rstrip("/").rpartition("/")[2][-_MAX_ADDRESS:]
    host, colon, port = address.rpartition(":")
    label = host.partition(".")[0]
    if colon and label and not label.isdigit() and "[" not in host and "." in host:
        return f"{label[:_MAX_ADDRESS]}:{port}" if label[:_MAX_ADDRESS] else address
    return address[-_MAX_ADDRESS:]


def draw_row() -> str:
    """A name for a row, drawn for it alone: it is part of no id, and cannot be guessed."""
    return os.urandom(4).hex()
