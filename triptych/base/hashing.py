"""Digests: `mm_hash`, the key of an item's embedding, and the roots of KV prefix chains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
from blake3 import blake3
from xxhash import xxh3_64_intdigest

from triptych.base.errors import InvalidRequest

MM_HASH = re.compile(r"[0-9a-f]{64}")
#: Names the purpose, so that no other digest of the same fields is ever equal.
DOMAIN = b"triptych.mm_hash.v1"
_TOWER_CHARACTERS = 32


def tower_of(namespace: str) -> str:
    """The half of a namespace that says which rows they are, whatever prepares the items.

    Decoders of one tower take the rows of encoders with other processor settings or another Pillow, too.
    """
    return namespace[:_TOWER_CHARACTERS]


def stored_as(namespace: str, dtype: str) -> str:
    """The namespace, or model key, of the same rows stored as `dtype`; its tower is that of the tower."""
    tower, whole = (
        framed_digest((("domain", b"triptych.stored_as"), ("dtype", dtype.encode()), ("rows", rows.encode())))
        for rows in (tower_of(namespace), namespace)
    )
    return tower_of(tower) + whole[_TOWER_CHARACTERS:]


def framed_digest(fields: Iterable[tuple[str, bytes | memoryview]]) -> str:
    """blake3-256 in hex over (tag, value) fields, each framed by its lengths: no boundary can shift."""
    digest = blake3()
    for tag, value in fields:
        name = tag.encode()
        digest.update(len(name).to_bytes(4, "little") + name + len(value).to_bytes(8, "little"))
        digest.update(value)
    return digest.hexdigest()


def rendezvous(key: str, address: str) -> int:
    """The weight of `address` for `key`: the highest one wins, whatever other addresses come or go."""
    return int(xxh3_64_intdigest(f"{key}|{address}".encode()))


def canonical(options: Mapping[str, object]) -> bytes:
    """The options as bytes that depend neither on key order nor on the process."""
    return msgspec.msgpack.encode(_sorted(options))


def _sorted(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value


def mm_hash(
    media: bytes | memoryview,
    *,
    namespace: str,
    modality: str,
    processor_options: Mapping[str, object] | None = None,
    salt: str = "",
) -> str:
    """The key of an item's embedding: 64 hex characters over all that changes it.

    `salt` keeps tenants apart. `processor_options` are the request's `mm_processor_kwargs`.
    """
    return framed_digest(
        (
            ("domain", DOMAIN),
            ("namespace", namespace.encode()),
            ("modality", modality.encode()),
            ("processor_options", canonical(processor_options or {})),
            ("salt", salt.encode()),
            ("media", media),
        )
    )


def check_mm_hash(value: str) -> str:
    """`value` if it is 64 lower-case hex characters; InvalidRequest otherwise."""
    if not MM_HASH.fullmatch(value):
        raise InvalidRequest("mm_hash must be 64 lower-case hex characters", param="mm_hash")
    return value


def prefix_root(model_key: str, salt: str, adapter: str = "") -> bytes:
    """The root of a KV prefix chain: tenants, models and adapters (by their keys) share no blocks."""
    fields = [
        ("domain", b"triptych.prefix.v1"),
        ("model_key", model_key.encode()),
        ("salt", salt.encode()),
    ]
    if adapter:
        fields.append(("adapter", adapter.encode()))
    return bytes.fromhex(framed_digest(fields))


def tenant_digest(tenant: str) -> str:
    """What workers know of a tenant, for turns and shares between tenants: 16 hex characters, not its name.

    Empty for an empty `tenant`, as where no API keys are in use.
    """
    return (
        framed_digest((("domain", b"triptych.tenant.v1"), ("tenant", tenant.encode())))[:16] if tenant else ""
    )
