"""Tokenization of rendered prompts, in which no user text becomes a special token, and of outputs.

A prompt is tokenised in three moves: the user's strings are interrupted inside whatever looks like a special
token, before they are rendered; then every special token left is the template's own and gets an unguessable
name; then the interruptions go, and a copy of the tokenizer that knows special tokens only by those names
does the rest. The detokenizer is a pure function of the output's tokens: an attempt that replays another's
continues at the character after the last one received.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, TypedDict

from tokenizers import Tokenizer

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import FinishReason, TimestampTokens
from triptych.models.base import GenerationDefaults
from triptych.models.checkpoint.folder import check_vocabulary
from triptych.models.registry import family_of
from triptych.pd_worker.core.sampling import ResolvedSampling

#: Seconds between two timestamps of all Whisper models.
STEP_SECONDS = 0.02
_REPLACEMENT = "\ufffd"
#: A character has at most four bytes, hence tokens: a longer wait is for no character.
_LONGEST_WAIT = 8


class TokenDecoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDecoder:
    """Text of a growing list of tokens, never cut inside a character.

    Only a window of tokens is decoded: those of the last text returned, for the context that decoders
    need around spaces, and those still without text.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        #: Tokens of the window whose text was returned already, and that text.
        self._returned = 0
        self._returned_text = ""

    def append(self, token_id: int) -> str:
        """The text that is now certain."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._returned_text) and not text.endswith(_REPLACEMENT):
            new = text[len(self._returned_text) :]
            self._advance(self._returned)
            return new
        if len(self._window) - self._returned > _LONGEST_WAIT:
            return self._stop_waiting(text)
        return ""

    def flush(self) -> str:
        """The rest, half characters as U+FFFD."""
        text = self._decode(self._window)
        new = text[len(self._returned_text) :]
        self._advance(self._returned)
        return new

    def _stop_waiting(self, text: str) -> str:
        """Everything but the last character, which may still be half."""
        if not text.endswith(_REPLACEMENT):
            # A run of special tokens, which have no text: the window can drop them.
            if self._decode(self._window[:-1]) == text:
                self._window.pop()
            return ""
        new = text[len(self._returned_text) : -1]
        for start in range(len(self._window) - 1, self._returned, -1):
            if self._decode(self._window[:start]) == text[:-1]:
                self._window, self._returned, self._returned_text = self._window[start:], 0, ""
                return new
        # The last character begins inside a token: the window stays whole.
        self._returned, self._returned_text = len(self._window), text[:-1]
        return new

    def _advance(self, start: int) -> None:
        self._window = self._window[start:]
        self._returned = len(self._window)
        self._returned_text = self._decode(self._window)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class OutputText:
    """One request's output as text, and its end.

    `resumed` are the output tokens of earlier attempts and `text_sent_chars` the characters of their text
    that were received; what is missing comes with the next token, or with `flush` when the resumed tokens
    ended the output already (then `finished` is set from the start). InvalidRequest when tokens follow
    that end. The decoded text stands alone: it is what the tokenizer makes of the output tokens.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        sampling: ResolvedSampling,
        resumed: Sequence[int] = (),
        text_sent_chars: int = 0,
    ) -> None:
        self.finished: FinishReason | None = None
        self.stop_sequence = ""
        self._sampling = sampling
        self._decoder = IncrementalDecoder(tokenizer)
        self._count = 0
        #: Decoded, but perhaps the beginning of a stop string.
        self._held = ""
        self._backlog = ""
        #: Characters that an earlier attempt has sent beyond what its tokens gave.
        self._skip = 0
        self._replay(resumed, text_sent_chars)

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that may now be sent, and the reason when `token_id` was the last token."""
        text = self._append(token_id)
        return self._unsent(text), self.finished

    def flush(self) -> str:
        """The text held back, for a request that is ended from outside; empty after its own end."""
        text = "" if self.finished else self._held + self._decoder.flush()
        self._held = ""
        return self._unsent(text)

    def _append(self, token_id: int) -> str:
        if self.finished:
            raise InvalidRequest("output_token_ids go on after the end of the output", param="resume")
        self._count += 1
        may_stop = self._count > self._sampling.min_tokens
        if self._ends(token_id, may_stop):
            included = self._decoder.append(token_id) if self._sampling.include_stop_str_in_output else ""
            return self._end(FinishReason.STOP, included + self._decoder.flush(), may_stop)
        new = self._decoder.append(token_id)
        if self._count >= self._sampling.max_tokens:
            return self._end(FinishReason.LENGTH, new + self._decoder.flush(), may_stop)
        return self._release(new, may_stop)

    def _ends(self, token_id: int, may_stop: bool) -> bool:
        # Where a grammar is complete and allows no more, the output ends before min_tokens.
        early = self._sampling.constrained and token_id in self._sampling.eos_token_ids
        return (may_stop or early) and token_id in self._sampling.stop_token_ids

    def _release(self, new: str, may_stop: bool) -> str:
        """The text before a stop string, or up to its end, or all that cannot become one."""
        text = self._held + new
        begin, length = self._find_stop(text, len(self._held)) if may_stop else (-1, 0)
        if begin >= 0:
            self.finished, self._held = FinishReason.STOP, ""
            self.stop_sequence = text[begin : begin + length]
            return text[: begin + length * self._sampling.include_stop_str_in_output]
        keep = _pending(text, self._sampling.stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _end(self, reason: FinishReason, new: str, may_stop: bool) -> str:
        text = self._release(new, may_stop)
        if self.finished is None:
            self.finished = reason
            text, self._held = text + self._held, ""
        return text

    def _find_stop(self, text: str, known: int) -> tuple[int, int]:
        """Begin and length of the first stop string that ends after the `known` characters; or -1."""
        stops = self._sampling.stop
        places = [(text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in stops]
        return min((place for place in places if place[0] >= 0), default=(-1, 0))

    def _replay(self, resumed: Sequence[int], text_sent_chars: int) -> None:
        text = "".join([self._append(token_id) for token_id in resumed])
        self._backlog = text[text_sent_chars:]
        self._skip = max(0, text_sent_chars - len(text))

    def _unsent(self, text: str) -> str:
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        text, self._backlog = self._backlog + text[skipped:], ""
        return text


def _pending(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string without being all of it."""
    longest = min(len(text), max((len(stop) for stop in stops), default=0) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops if len(stop) > length):
            return length
    return 0


def timestamp_tokens(defaults: GenerationDefaults) -> TimestampTokens | None:
    """The timestamp tokens of a checkpoint: those after its `<|notimestamps|>` token."""
    no_timestamps = defaults.extra.get("no_timestamps_token_id")
    return None if no_timestamps is None else TimestampTokens(int(no_timestamps) + 1, STEP_SECONDS)


class TimelessDecoder:
    """A token decoder that drops timestamps, which tokenizers do not count as special tokens."""

    def __init__(self, tokenizer: TokenDecoder, timestamps: TimestampTokens) -> None:
        self._tokenizer = tokenizer
        self._first = timestamps.first

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [token for token in ids if token < self._first]
        return self._tokenizer.decode(ids, skip_special_tokens)


class MarkerDecoder:
    """A token decoder that skips all special tokens but `kept`, and those that are `dropped`."""

    def __init__(self, tokenizer: TokenDecoder, kept: Set[int], dropped: Set[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._dropped = dropped

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens and not self._dropped.isdisjoint(ids):
            ids = [token for token in ids if token not in self._dropped]
        if not skip_special_tokens or self._kept.isdisjoint(ids):
            return self._tokenizer.decode(ids, skip_special_tokens)
        texts, begin = [], 0
        for index, token in enumerate(ids):
            if token in self._kept:
                texts.append(self._tokenizer.decode(ids[begin:index], True))
                texts.append(self._tokenizer.decode([token], False))
                begin = index + 1
        return "".join([*texts, self._tokenizer.decode(ids[begin:], True)])


_NONCE_DIGITS = 32
#: Characters above which a text is encoded as a batch of one: that releases the interpreter's lock, which
#: the engine's thread wants at every step.
_SHORT_TEXT = 4096


class FastTokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> object: ...

    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...


class _AddedToken(TypedDict):
    id: int
    content: str
    special: bool
    single_word: bool


def load_tokenizer(path: Path) -> FastTokenizer:
    """The checkpoint's fast tokenizer, as transformers loads it; ConfigError when there is none."""
    from transformers import AutoTokenizer

    check_vocabulary(path)
    try:
        tokenizer: FastTokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise ConfigError(f"MODEL={path} has no usable tokenizer (tokenizer.json): {reason}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"MODEL={path} has no fast tokenizer: put its tokenizer.json into the folder")
    return tokenizer


class GuardedTokenizer:
    """Tokenises what `protect` has prepared. Thread-safe: nothing changes after construction.

    `specials` are further token ids to guard, such as an image token that is not marked as special.
    """

    def __init__(self, backend: Tokenizer, *, bos_token: str = "", specials: tuple[int, ...] = ()) -> None:
        spec = json.loads(backend.to_str())
        tokens: list[_AddedToken] = [
            token
            for token in spec["added_tokens"]
            # One character cannot be interrupted; it stays what it is.
            if (token["special"] or token["id"] in specials) and len(token["content"]) > 1
        ]
        guarded = {token["content"]: token["id"] for token in tokens}
        self.special_ids = frozenset(guarded.values())
        self._bos_token = bos_token
        self._break, name = _nonce(), _nonce()
        self._nonces = (self._break, name)
        self._names = {content: f"<|{name}.{index}|>" for index, content in enumerate(guarded)}
        #: Texts that no client can write as a token, wherever the text stands.
        self._withheld = {token["content"] for token in tokens if token["id"] in specials}
        self._pattern = _any_of(tokens)
        self._heads = {text[:size] for text in guarded for size in range(1, len(text))}
        self._tails = {text[-size:] for text in guarded for size in range(1, len(text))}
        self._reach = max((len(text) for text in guarded), default=1) - 1
        self._tokenizer = Tokenizer.from_str(json.dumps(_renamed(spec, self._names)))
        ids = {self._tokenizer.token_to_id(self._names[text]): token for text, token in guarded.items()}
        #: Tokens that have another id under their names.
        self._ids = {renamed: token for renamed, token in ids.items() if renamed != token}

    def protect(self, text: str) -> str:
        """`text` of a user, ready to be rendered."""
        while any(nonce in text for nonce in self._nonces):
            for nonce in self._nonces:
                text = text.replace(nonce, "")
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + self._break + match[0][1:], text)
        # The template's text before or after must not complete a special token either.
        if any(text[:size] in self._tails for size in range(1, self._reach + 1)):
            text = self._break + text
        if any(text[-size:] in self._heads for size in range(1, self._reach + 1)):
            text += self._break
        return text

    def encode(self, rendered: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt rendered from protected strings.

        The tokenizer's own first token is added, as transformers' processors do, unless the template
        wrote it.
        """
        named = self._pattern.sub(lambda match: self._names[match[0]], rendered)
        return self._encode(named.replace(self._break, ""), rendered, add_special_tokens)

    def encode_raw(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a client's text in which special tokens count, all but `specials`."""
        return self._encode(self._named(text), text, add_special_tokens)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts of a client, as the tokenizer joins a pair."""
        return self._own_ids(self._tokenizer.encode(self._named(first), self._named(second)).ids)

    def _named(self, text: str) -> str:
        """The text with its special tokens, all but `specials`, under their names here."""
        for nonce in self._nonces:
            text = text.replace(nonce, "")
        return self._pattern.sub(
            lambda match: match[0] if match[0] in self._withheld else self._names[match[0]], text
        )

    def _encode(self, plain: str, written: str, add_special_tokens: bool) -> list[int]:
        bos_written = bool(self._bos_token) and written.startswith(self._bos_token)
        special = add_special_tokens and not bos_written
        if len(plain) <= _SHORT_TEXT:
            ids = self._tokenizer.encode(plain, add_special_tokens=special).ids
        else:
            # Fast: without the text and the place of each token. To free those of a long prompt takes longer
            # than a step, under the lock.
            ids = self._tokenizer.encode_batch_fast([plain], add_special_tokens=special)[0].ids
        return self._own_ids(ids)

    def _own_ids(self, ids: list[int]) -> list[int]:
        """The ids in the checkpoint's own vocabulary: nearly always the same."""
        return [self._ids.get(token, token) for token in ids] if self._ids else ids


def _any_of(tokens: Sequence[_AddedToken]) -> re.Pattern[str]:
    """Finds special tokens as the tokenizer does: the longest first, `single_word` ones between non-words."""
    longest_first = sorted(tokens, key=lambda token: len(token["content"]), reverse=True)
    choices = [
        rf"(?<!\w){re.escape(token['content'])}(?!\w)"
        if token["single_word"]
        else re.escape(token["content"])
        for token in longest_first
    ]
    # Without special tokens nothing may match.
    return re.compile("|".join(choices) or r"(?!)")


def _nonce() -> str:
    """Digits: no case, no word boundary, nothing that a template's filters would change."""
    return f"{secrets.randbelow(10**_NONCE_DIGITS):0{_NONCE_DIGITS}d}"


def _renamed(spec: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The tokenizer's JSON in which the special tokens bear other names, in the vocabulary too.

    Else a model that looks whole words up in its vocabulary could still find them in a user's text.
    """
    model = dict(spec["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in names]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        token | {"content": names.get(token["content"], token["content"])} for token in spec["added_tokens"]
    ]
    return {**spec, "model": model, "added_tokens": added, "truncation": None, "padding": None}


def _merged(merge: str | Sequence[str]) -> str:
    return "".join(merge.split(" ", 1) if isinstance(merge, str) else merge)


def check_prompts(path: Path) -> None:
    """ConfigError for a folder that no prompt can be made with, before its weights are read."""
    decoder = family_of(path).decoder
    decoder.cross_of(decoder.read_config(path))
    load_tokenizer(path)
