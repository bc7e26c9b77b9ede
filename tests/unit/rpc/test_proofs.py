"""A registration counts only as it was signed, by whoever knows the internal token."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from triptych.base.rpc.proofs import InternalKey, age_of, client_nonce, identity_of, worker_nonce
from triptych.base.types import WorkerInfo

INFO = WorkerInfo("10.0.0.7:1", "pd", "i1", "k" * 64, "m", ("n" * 64,), {"max_num_seqs": 4}, "image")
KEY = InternalKey("the-token-of-this-test")

#: Every field of a registration, changed.
CHANGES = {
    "address": "10.0.0.8:1",
    "pool": "encoder",
    "incarnation": "i2",
    "model_key": "l" * 64,
    "model": "other",
    "namespaces": ("o" * 64,),
    "capacity": {"max_num_seqs": 5},
    "modality": "audio",
    "proof": "",
    "kind": "cuda other",
}


#: What a worker of a release without kinds signs.
OLD_CONTENT = json.dumps(
    {
        "address": "10.0.0.7:1",
        "capacity": {"max_num_seqs": 4},
        "incarnation": "i1",
        "modality": "image",
        "model": "m",
        "model_key": "k" * 64,
        "namespaces": ["n" * 64],
        "pool": "pd",
        "proof": "",
    }
)


def test_a_signed_registration_is_accepted_with_the_token() -> None:
    assert InternalKey("the-token-of-this-test").has_signed(KEY.signed(INFO))
    assert KEY.has_signed(KEY.signed(KEY.signed(INFO)))


def test_an_unsigned_one_or_one_of_another_token_is_not() -> None:
    assert not KEY.has_signed(INFO)
    assert not InternalKey("another-token-altogether").has_signed(KEY.signed(INFO))


@pytest.mark.parametrize("field", [field.name for field in fields(WorkerInfo)])
def test_no_field_can_be_changed_after_it_was_signed(field: str) -> None:
    assert not KEY.has_signed(replace(KEY.signed(INFO), **{field: CHANGES[field]}))


def test_a_worker_of_a_release_without_kinds_is_known() -> None:
    assert KEY.signed(INFO).proof == KEY._proof(b"registration", OLD_CONTENT.encode()).hex()


@pytest.mark.parametrize("forged", [{"proof": 5}, {"proof": "é"}, {"capacity": {b"": 1}}, {"capacity": None}])
def test_fields_of_other_kinds_are_no_error(forged: dict[str, object]) -> None:
    assert not KEY.has_signed(replace(INFO, **forged))  # type: ignore[arg-type]


def test_identities_frame_their_fields() -> None:
    moved = replace(INFO, pool="pd1", address="0.0.0.7:1")
    assert len({identity_of(info) for info in (INFO, moved, replace(INFO, incarnation="i2"))}) == 3
    assert identity_of(INFO) == identity_of(replace(INFO, capacity={}, model="other"))


def test_proofs_differ_by_kind_identity_and_nonces() -> None:
    identity, client, worker = identity_of(INFO), client_nonce(), worker_nonce(5.0)
    proofs = {
        KEY.worker_proof(identity, client, worker),
        KEY.client_proof(identity, client, worker),
        KEY.client_proof(identity, worker, client),
        KEY.client_proof(client, identity, worker),
        InternalKey("another-token-altogether").client_proof(identity, client, worker),
    }
    assert len(proofs) == 5


def test_no_nonce_comes_twice_and_a_workers_tells_its_age() -> None:
    assert len({client_nonce() for _ in range(100)} | {worker_nonce(7.0) for _ in range(100)}) == 200
    assert age_of(worker_nonce(7.0), 9.5) == 2.5
