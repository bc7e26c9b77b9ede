"""Texts of a vocabulary's tokens, for log-probabilities."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.protos import common_pb2

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


class TokenTexts:
    """`texts[token_id]` is (text, bytes); half characters are U+FFFD in the text. Thread-safe.

    Bytes are those that the token adds inside of an output: a token that starts a word has its blank.
    Special tokens stand for their own names; an id beyond the vocabulary for nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        forms = f"{tokenizer.decoder} {tokenizer.pre_tokenizer}"
        self._byte_level = _byte_level() if "ByteLevel" in forms else None
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        if (known := self._known.get(token_id)) is None:
            utf8 = self._bytes(token_id)
            known = self._known[token_id] = (utf8.decode("utf-8", "replace"), utf8)
        return known

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level is not None:
            return b"".join(self._byte_level.get(char, char.encode()) for char in piece)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_WORD_START, " ").encode()


def _byte_level() -> dict[str, bytes]:
    """The characters that byte-level vocabularies write bytes with: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


def logprobs_to_proto(raw: RawLogprobs, texts: TokenTexts) -> common_pb2.PositionLogprobs:
    def token(token_id: int, logprob: float) -> common_pb2.TokenLogprob:
        text, utf8 = texts[token_id]
        return common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text=text, utf8=utf8)

    return common_pb2.PositionLogprobs(chosen=token(*raw.chosen), top=[token(*pair) for pair in raw.top])
