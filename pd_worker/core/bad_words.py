"""Texts that must not come, as token ids: the last id of each is banned where the ids before it stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.base.errors import InvalidRequest


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word at a text's start and behind a blank.

    vLLM leaves the second out where it has another length, and lets the word through there. InvalidRequest
    for a word without tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        first = tuple(encode(word.lstrip()))
        if not first:
            raise InvalidRequest("bad_words: one of them has no tokens", param="bad_words")
        after_blank = tuple(encode(f" {word.lstrip()}"))
        sequences[first] = None
        if after_blank[-len(first) :] != first:
            sequences[after_blank] = None
    return tuple(sequences)


def banned_ids(sequences: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """The ids that would complete one of `sequences` at the end of the output."""
    return [
        ids[-1]
        for ids in sequences
        if len(ids) <= len(output_ids) + 1
        and list(output_ids[len(output_ids) + 1 - len(ids) :]) == list(ids[:-1])
    ]
