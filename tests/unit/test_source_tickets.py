"""Tickets for sources are of one item, one attempt, one token; a connector shows that it has the token."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from support.data.items import make_plan
from triptych.base.source_tickets import PROOF, SourceTickets
from triptych.base.types import EmbeddingSource, JsonObject

TOKEN, OTHER = "t" * 32, "u" * 32
ATTEMPT, ID = "a" * 32, f"generate-tokens-{'a' * 32}-1a2b3c4d"
SOURCE = EmbeddingSource("n" * 32, "triptych-ec-1", "10.0.0.7:9000")
PLAN = replace(make_plan(), runs=((0, 3), (5, 2)), grid_thw=(1, 4, 4))


def over_http(entry: JsonObject) -> JsonObject:
    """As vLLM has it: through JSON, with lists."""
    sent: JsonObject = json.loads(json.dumps(entry))
    return sent


def ticket() -> JsonObject:
    return over_http(SourceTickets(TOKEN).entry(PLAN, SOURCE, ATTEMPT))


def test_a_ticket_of_the_call_is_read_as_it_was_written() -> None:
    assert SourceTickets(TOKEN).read(PLAN.mm_hash, ticket(), ID) == (PLAN, SOURCE)


def test_a_ticket_of_rows_in_8_bits_is_read_and_one_of_others_has_what_earlier_connectors_sign() -> None:
    int8, tickets = replace(PLAN, dtype="int8", scales=2), SourceTickets(TOKEN)
    entry = over_http(tickets.entry(int8, SOURCE, ATTEMPT))
    assert tickets.read(int8.mm_hash, entry, ID) == (int8, SOURCE)
    assert "scales" not in ticket()["plan"]
    entry["plan"]["scales"] = 4
    assert tickets.read(int8.mm_hash, entry, ID) is None


def test_both_tokens_are_accepted_while_one_is_rotated() -> None:
    assert SourceTickets(f"{OTHER}\n{TOKEN}").read(PLAN.mm_hash, ticket(), ID) is not None
    assert SourceTickets(OTHER).read(PLAN.mm_hash, ticket(), ID) is None


def test_a_ticket_is_of_one_item_and_one_attempt() -> None:
    tickets = SourceTickets(TOKEN)
    assert tickets.read("0" * 64, ticket(), ID) is None
    assert tickets.read(PLAN.mm_hash, ticket(), f"generate-tokens-{'b' * 32}-1a2b3c4d") is None
    short = over_http(tickets.entry(PLAN, SOURCE, ""))
    assert tickets.read(PLAN.mm_hash, short, ID) is None, "an empty attempt is in every id"


@pytest.mark.parametrize("part", ["plan", "source", "attempt", "proof"])
def test_what_was_changed_or_left_out_is_no_ticket(part: str) -> None:
    tickets, changed = SourceTickets(TOKEN), ticket()
    del changed[part]
    assert tickets.read(PLAN.mm_hash, changed, ID) is None
    if part == "source":
        changed[part] = asdict(replace(SOURCE, address="169.254.169.254:80"))
    elif part == "plan":
        changed[part] = over_http(asdict(replace(PLAN, rows=PLAN.rows + 1)))
    elif part == "attempt":
        changed[part] = "b" * 32
    else:
        changed[part] = "0" * 64
    assert tickets.read(PLAN.mm_hash, changed, ID.replace("a" * 32, str(changed["attempt"]))) is None


@pytest.mark.parametrize("entry", [None, 1, "x", [], {}, {"namespace": "f" * 64}, {"proof": "\ud800"}])
def test_entries_without_a_ticket_are_the_stores(entry: object) -> None:
    assert SourceTickets(TOKEN).read(PLAN.mm_hash, entry, ID) is None


def asked(question: str) -> JsonObject:
    return {PROOF: {"question": question}}


@pytest.mark.parametrize(
    ("theirs", "has", "needed", "proven"),
    [
        (TOKEN, False, False, True),
        (TOKEN, True, True, True),
        (TOKEN, True, False, True),
        (TOKEN, False, True, False),
        (OTHER, True, True, False),
    ],
)
def test_a_connector_proves_its_token_and_certificates(theirs, has, needed, proven):
    answer = SourceTickets(theirs).answer(asked("q1"), encrypted=has)
    assert SourceTickets(TOKEN).proven("q1", answer, encrypted=needed) is proven
    assert not SourceTickets(TOKEN).proven("q2", answer, encrypted=needed), "it is of one question"


def test_an_answer_that_claims_certificates_is_not_the_connectors() -> None:
    answer = SourceTickets(TOKEN).answer(asked("q1"), encrypted=False)
    assert answer is not None
    answer[PROOF]["encrypted"] = True
    assert not SourceTickets(TOKEN).proven("q1", answer, encrypted=True)


@pytest.mark.parametrize(
    "params", [None, {}, {PROOF: None}, {PROOF: {"proof": 1}}, {PROOF: {"proof": "\ud800"}}]
)
def test_no_answer_is_no_proof(params: object) -> None:
    tickets = SourceTickets(TOKEN)
    assert not tickets.proven("q1", params, encrypted=False)
    assert tickets.answer(params, encrypted=False) is None, "nothing was asked"
