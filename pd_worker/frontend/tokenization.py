"""Tokenization of rendered prompts in which no user text becomes a special token.

In three moves: the user's strings are interrupted inside whatever looks like a special token, before they
are rendered; then every special token left is the template's own and gets an unguessable name;
then the interruptions go, and a copy of the tokenizer that knows special tokens only by those names
does the rest. Ordinary text is tokenised as transformers does it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

from tokenizers import Tokenizer

from triptych.base.errors import ConfigError
from triptych.models.checkpoint.folder import check_vocabulary

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
        self._ids = {self._tokenizer.token_to_id(self._names[text]): token for text, token in guarded.items()}

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
        ids = self._tokenizer.encode(self._named(first), self._named(second)).ids
        return [self._ids.get(token, token) for token in ids]

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
            ids = self._tokenizer.encode_batch([plain], add_special_tokens=special)[0].ids
        return [self._ids.get(token, token) for token in ids]


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
