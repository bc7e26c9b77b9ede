"""The budgets of the embeddings' way: the store, and the port from which PD workers fetch."""

from __future__ import annotations

from triptych.base.budgets import SharedBudget
from triptych.ec_connector.connectors.output_server import MAX_CONNECTIONS
from triptych.store.topology.topology import BULK_CONNECTIONS

BUDGETS: tuple[SharedBudget, ...] = (
    SharedBudget(
        "store",
        "bytes of embeddings",
        "the store's `maxmemory`",
        "share",
        "near its limit, a tenant above its share ([store](store.md#shares-of-tenants)) loses its oldest; "
        "then the least recently used are evicted. What is lost is encoded again on demand",
        flag="--store-memory",
    ),
    SharedBudget(
        "KV blocks in the store",
        "bytes of keys and values, with `--share-prefixes`",
        "0.25 of the store's `maxmemory`",
        "share",
        "the tenant with most of them loses its oldest before a save; what is lost is computed",
        flag="--kv-store-share",
    ),
    SharedBudget(
        "store connections",
        "transfers at once from one process",
        f"{BULK_CONNECTIONS}",
        "order",
        "they wait, within their deadline",
        made=("store/bulk_pool.py: Semaphore",),
    ),
    SharedBudget(
        "data port",
        "connections to one encoder worker",
        f"{MAX_CONNECTIONS}",
        "order",
        "closed; the embedding comes by the store",
    ),
)
