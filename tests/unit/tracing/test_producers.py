from __future__ import annotations

from support.tracing.spans import new_context
from triptych.base.tracing.context import Producers, to_bytes


def test_a_noted_producer_is_a_link_of_all_that_read_the_item() -> None:
    producers, context = Producers(), new_context(sampled=True)
    producers.note("a", to_bytes(context))
    assert producers.links("a") == (context,) == producers.links("a")
    assert producers.links("b") == ()


def test_a_value_without_a_producer_replaces_one_that_had_one() -> None:
    producers = Producers()
    producers.note("a", to_bytes(new_context(sampled=True)))
    producers.note("a", b"")
    assert producers.links("a") == ()
    assert producers.raw("a") == b""


def test_bytes_of_a_damaged_or_foreign_form_are_no_link() -> None:
    producers = Producers()
    producers.note("a", b"\xff" * 7)
    producers.note("b", bytes(25))
    assert producers.links("a") == producers.links("b") == ()
