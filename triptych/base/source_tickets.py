"""Sources of embeddings that a PD worker hands to vLLM's connector, signed with the cluster's token."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict

import msgspec

from triptych.base.types import EmbeddingSource, ItemPlan, JsonObject, prepared

_DIGEST = "sha256"
#: The entry of `ec_transfer_params` that is no item's: a question, or its answer, by which the connector
#: proves that it has the token.
PROOF = "triptych"


class Ticket(msgspec.Struct, frozen=True):
    """Where an item can be read, in one call alone."""

    namespace: str
    plan: ItemPlan
    source: EmbeddingSource
    attempt: str
    proof: str


class SourceTickets:
    """Signs and reads tickets, with keys made of the token's lines: the first one signs, each is accepted.

    A ticket is of one item and one attempt: a caller of vLLM that has seen one cannot use it in a call of its
    own, and nobody without the token has the connector connect to an address.
    """

    def __init__(self, tokens: str) -> None:
        lines = [line.encode() for line in tokens.split("\n")]
        self._keys = tuple(hmac.digest(line, b"triptych source key 1", _DIGEST) for line in lines)

    def entry(self, plan: ItemPlan, source: EmbeddingSource, attempt: str) -> JsonObject:
        """The entry of `ec_transfer_params` for one item."""
        fields = {"plan": _plan_fields(plan), "source": asdict(source), "attempt": attempt}
        return {"namespace": plan.namespace, **fields, "proof": _mac(self._keys[0], "source", fields)}

    def read(self, mm_hash: str, entry: object, request_id: str) -> tuple[ItemPlan, EmbeddingSource] | None:
        """Plan and source of the entry of `mm_hash` in the call `request_id`; None for any other entry."""
        try:
            ticket = msgspec.convert(entry, prepared(Ticket))
        except msgspec.ValidationError:
            return None
        fields = {
            "plan": _plan_fields(ticket.plan),
            "source": asdict(ticket.source),
            "attempt": ticket.attempt,
        }
        # vLLM puts words of its own before and after the id that a call has.
        ours = len(ticket.attempt) >= 32 and ticket.attempt in request_id
        right = ours and ticket.plan.mm_hash == mm_hash and self._signed("source", fields, ticket.proof)
        return (ticket.plan, ticket.source) if right else None

    def answer(self, params: object, *, encrypted: bool) -> JsonObject | None:
        """The connector's answer to the question in `params`; None where there is none.

        `encrypted`: it has certificates for services.
        """
        asked = params.get(PROOF) if isinstance(params, Mapping) else None
        question = asked.get("question") if isinstance(asked, Mapping) else None
        if not isinstance(question, str):
            return None
        fields = {"question": question, "encrypted": encrypted}
        return {PROOF: {"encrypted": encrypted, "proof": _mac(self._keys[0], "answer", fields)}}

    def proven(self, question: str, params: object, *, encrypted: bool) -> bool:
        """Whether `params` answer the question, by the token, with certificates where these are needed."""
        said = params.get(PROOF) if isinstance(params, Mapping) else None
        if not isinstance(said, Mapping) or not isinstance(said.get("proof"), str):
            return False
        has = said.get("encrypted") is True
        signed = self._signed("answer", {"question": question, "encrypted": has}, said["proof"])
        return signed and (has or not encrypted)

    def _signed(self, kind: str, fields: JsonObject, proof: str) -> bool:
        given = proof.encode(errors="replace")
        return any([hmac.compare_digest(_mac(key, kind, fields).encode(), given) for key in self._keys])


def _plan_fields(plan: ItemPlan) -> JsonObject:
    """As of releases without scales, where it has none: their connectors sign what they know."""
    fields = asdict(plan)
    return fields if plan.scales else {name: each for name, each in fields.items() if name != "scales"}


def _mac(key: bytes, kind: str, fields: JsonObject) -> str:
    content = json.dumps(fields, sort_keys=True).encode()
    return hmac.digest(key, f"triptych 1 {kind}\0".encode() + content, _DIGEST).hex()
