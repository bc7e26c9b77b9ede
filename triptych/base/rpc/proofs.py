"""HMAC proofs of knowing the cluster's internal token. None of them contains it.

All are HMAC-SHA256 under a key derived from the token, over a label of their kind and

- a registration: all its fields, so that no other process can put a worker into the registry;
- a worker's answer to a challenge: the worker's identity (pool, address, incarnation) and both nonces;
- a client's calls: the same, so that they count only at that worker.

The client draws a nonce, and verifies the worker's proof before it sends anything else. The worker draws the
other nonce: its first bytes are the time, by which the proof's validity ends. The identity in a proof is the
one that the client means, and a worker answers for its own only: a fake one cannot pass a challenge on.
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import asdict, replace

from triptych.base.hashing import framed_digest
from triptych.base.types import WorkerInfo

#: Bytes of an identity, a nonce and a proof each.
SIZE = 32
_TIME_BYTES = 8
_DIGEST = "sha256"


def identity_of(info: WorkerInfo) -> bytes:
    """The identity of a worker process: one incarnation of one pool at one address."""
    fields = (("pool", info.pool), ("address", info.address), ("incarnation", info.incarnation))
    return bytes.fromhex(framed_digest((name, value.encode()) for name, value in fields))


def client_nonce() -> bytes:
    """A client's nonce."""
    return secrets.token_bytes(SIZE)


def worker_nonce(now: float) -> bytes:
    """A worker's nonce, at `now` seconds on its monotonic clock."""
    return int(now * 1000).to_bytes(_TIME_BYTES, "big") + secrets.token_bytes(SIZE - _TIME_BYTES)


def age_of(nonce: bytes, now: float) -> float:
    """Seconds since the worker drew this nonce."""
    return now - int.from_bytes(nonce[:_TIME_BYTES], "big") / 1000


class InternalKey:
    """The key that makes and verifies the proofs of one internal token."""

    def __init__(self, token: str) -> None:
        self._key = hmac.digest(token.encode(), b"triptych internal key 1", _DIGEST)

    def signed(self, info: WorkerInfo) -> WorkerInfo:
        """The registration with its proof."""
        return replace(info, proof=self._registration_proof(info))

    def has_signed(self, info: WorkerInfo) -> bool:
        """Whether the writer of this registration, as it is, knows the token."""
        try:
            return hmac.compare_digest(self._registration_proof(info).encode(), info.proof.encode())
        except (TypeError, ValueError, AttributeError):
            return False  # fields that no worker of ours writes

    def _registration_proof(self, info: WorkerInfo) -> str:
        fields = asdict(replace(info, proof=""))
        if not info.kind:
            del fields["kind"]  # workers of releases without it sign without it
        return self._proof(b"registration", json.dumps(fields, sort_keys=True).encode()).hex()

    def worker_proof(self, identity: bytes, client: bytes, worker: bytes) -> bytes:
        """A worker's proof, over its identity and the nonces of both sides."""
        return self._proof(b"worker", identity, client, worker)

    def client_proof(self, identity: bytes, client: bytes, worker: bytes) -> bytes:
        """A client's proof, over the identity of the worker that it means and the nonces of both sides."""
        return self._proof(b"client", identity, client, worker)

    def _proof(self, kind: bytes, *parts: bytes) -> bytes:
        # One label never begins another, and all parts but a registration's have one size.
        return hmac.digest(self._key, b"\0".join([b"triptych 1 " + kind, b"".join(parts)]), _DIGEST)


class InternalKeys:
    """The keys of the internal token, of which there are several while it is rotated.

    `tokens` are lines: with the first one's key proofs are made, all of them verify.
    """

    def __init__(self, tokens: str) -> None:
        self._keys = tuple(InternalKey(token) for token in tokens.split("\n"))

    def signed(self, info: WorkerInfo) -> WorkerInfo:
        """The registration with its proof."""
        return self._keys[0].signed(info)

    def has_signed(self, info: WorkerInfo) -> bool:
        """Whether the writer of this registration, as it is, knows one of the tokens."""
        return any(key.has_signed(info) for key in self._keys)

    def worker_proof(self, identity: bytes, client: bytes, worker: bytes) -> bytes:
        """A worker's proof, over its identity and the nonces of both sides."""
        return self._keys[0].worker_proof(identity, client, worker)

    def key_of_worker(
        self, identity: bytes, client: bytes, worker: bytes, proof: bytes
    ) -> InternalKey | None:
        """The key that made this worker's proof, which the client's own is then made with; None: none did."""
        for key in self._keys:
            if hmac.compare_digest(key.worker_proof(identity, client, worker), proof):
                return key
        return None

    def admits(self, identity: bytes, client: bytes, worker: bytes, proof: bytes) -> bool:
        """Whether this client's proof was made with one of the keys."""
        return any(
            hmac.compare_digest(key.client_proof(identity, client, worker), proof) for key in self._keys
        )
