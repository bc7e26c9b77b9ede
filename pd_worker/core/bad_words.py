"""Texts that must not come, as token ids: the last id of each is banned where the ids before it stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.errors import InvalidRequest


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word at a text's start and, where they are as many, behind a blank.

    This is vLLM's rule. InvalidRequest for a word without tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        first = tuple(encode(word.lstrip()))
        if not first:
            raise InvalidRequest("bad_words: one of them has no tokens", param="bad_words")
        after_blank = tuple(encode(f" {word.lstrip()}"))
        found.append(first)
        if after_blank[:1] != first[:1] and len(after_blank) == len(first):
            found.append(after_blank)
    return tuple(found)


def banned_ids(sequences: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """The ids that would complete one of `sequences` at the end of the output."""
    return [
        ids[-1]
        for ids in sequences
        if len(ids) <= len(output_ids) + 1
        and list(output_ids[len(output_ids) + 1 - len(ids) :]) == list(ids[:-1])
    ]
