"""Every key in the store, how long it lives, and why.

Keys that one command touches share a tag in braces, so that a Redis Cluster keeps them on one server: the
item's `{mm_hash}`, `{leases}`, `{registry}`, `{scaling}`, `{limits}`, `{usage:N}`. A namespace needs no
prefix: it is part of the mm_hash.
"""

from __future__ import annotations

from triptych.base.hashing import check_mm_hash

#: One value per item. Has a TTL: the server's volatile-lru evicts only what has one.
EMBEDDING = "ec:"
#: One value per group of KV blocks, in the form of an embedding's; users of the store may have the right to
#: write these and not those.
KV = "kv:"
#: One hash of the items in a tower, field mm_hash. No TTL: keys with a TTL are evicted before it ends.
LEASES = "{leases}:owners"
#: When each lease ends, in ms of the server's clock: a sorted set, so that the dead are found without a scan.
LEASE_DEADLINES = "{leases}:deadlines"
#: One hash of all workers, field `pool address`. No TTL, for the same reason.
WORKERS = "{registry}:workers"
#: When each registration ends; as with leases.
WORKER_DEADLINES = "{registry}:deadlines"
#: Counts the changes of the workers; their going by a deadline is none.
VERSION = "{registry}:version"
#: When each proxy's declaration ends; as with leases.
PROXIES = "{registry}:proxies"
#: A random word. No TTL: it goes only with everything else, so another word means a flush or restart.
EPOCH = "{registry}:epoch"

#: The newest scaling decision for each pool, a hash. No TTL, as with registrations.
DECISIONS = "{scaling}:decisions"
#: When each of them ends; as with leases.
DECISION_DEADLINES = "{scaling}:deadlines"
#: The rules that all proxies decide by, a hash: fields `pool`, `pool:generation`, `pool:until`. No TTL.
RULES = "{scaling}:rules"

#: Seconds that an unused embedding stays unless its writer sets another TTL.
EMBEDDING_TTL = 3600.0
#: Seconds that the parts of a split value outlive its header: a reader of the header finds them.
PART_GRACE = 120.0
#: Seconds past their deadline after which leases and registrations are deleted by anyone.
DEAD_AFTER = 600.0


def embedding(mm_hash: str, kind: str = EMBEDDING) -> str:
    """The item's value, or the KV blocks'; InvalidRequest when `mm_hash` is not 64 hex characters."""
    return f"{kind}{{{check_mm_hash(mm_hash)}}}"


def part(mm_hash: str, write_id: str, index: int, kind: str = EMBEDDING) -> str:
    """Part `index` of a value over 64 MiB, named by the write so that two writers never mix."""
    return f"{embedding(mm_hash, kind)}:{write_id}:{index}"


def same_rows(content: str) -> str:
    """The mm_hash of an item whose tower gets these inputs. Lives as long as an unused embedding."""
    return f"{embedding(content)}:same"


def demands(pool: str) -> tuple[str, str]:
    """The hash of the proxies' demand for workers of the pool, and when each entry ends. No TTL."""
    return f"{{scaling}}:{pool}:demands", f"{{scaling}}:{pool}:demand-deadlines"


def minute_counts(what: str, principal: str) -> str:
    """The requests or tokens of an API key, by minute. TTL 2 minutes; once evicted, it begins again."""
    return f"{{limits}}:{what}:{principal}"


def usage(shard: str, tenant: str, kind: str) -> tuple[str, str]:
    """A shard's bytes by `tenant:kind`, a hash without TTL, and the index of one tenant's values by their
    last save, a sorted set that outlives them a little.
    """
    return f"{{usage:{shard}}}:bytes", f"{{usage:{shard}}}:items:{tenant}:{kind}"


def kv_usage(shard: str, tenant: str) -> tuple[str, str]:
    """As `usage`, of KV blocks: they have a part of the server's memory, whose tenants have shares in it."""
    return f"{{usage:{shard}}}:kv:bytes", f"{{usage:{shard}}}:kv:items:{tenant}"
