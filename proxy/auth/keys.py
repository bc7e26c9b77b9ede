"""API keys: the principal behind each and its limits. Pure values; `key_ring` reads the file.

A key file has one key per line, `#` begins a comment:

    alice  sha256:9f86d081884c7d65…  requests-per-minute=600 concurrent-requests=8 models=qwen,qwen-sql
    ops    sha256:2c26b46b68ffc68f…  operator

Keys are 256 random bits, so that a plain SHA-256 tells nothing of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.base.errors import ConfigError

#: Shorter ones can be guessed.
MIN_KEY_CHARS = 16
#: The word of a key file's line that makes its principal an operator.
OPERATOR = "operator"
#: What its word with the names of models and adapters begins with.
MODELS = "models="
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits that the keys of one name share; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0


@dataclass(frozen=True, slots=True)
class Principal:
    """The client that a key identifies; keys with the same name, such as an old and a new one, share it.

    An operator sees the requests of all tenants in the live data. `models` are the models and adapters that
    it may name; None: all.
    """

    id: str
    limits: KeyLimits
    operator: bool = False
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """`digest`: SHA-256 of the key."""

    digest: bytes
    principal: Principal


class KeyTable:
    """All valid keys, by the digest of each: 10,000 of them cost a request what ten do.

    What a look-up's time tells of the digests is of no use to a client, which cannot choose the digest of
    what it sends.
    """

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._principals = {entry.digest: entry.principal for entry in entries}

    def __len__(self) -> int:
        return len(self._principals)

    @property
    def principals(self) -> int:
        return len({principal.id for principal in self._principals.values()})

    def find(self, key: bytes) -> Principal | None:
        """Whose key it is; None when it is none of them."""
        return self._principals.get(hashlib.sha256(key).digest())


def parse_key_lines(text: str, defaults: KeyLimits) -> list[KeyEntry]:
    """The entries of a key file; `defaults` are the limits that a line does not name.

    ConfigError names the line and what is wrong with it, never its content.
    """
    entries: list[KeyEntry] = []
    known: dict[str, Principal] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        entry = _entry(f"line {number}", fields, defaults)
        principal = known.setdefault(entry.principal.id, entry.principal)
        if principal != entry.principal:
            raise ConfigError(f"line {number}: the lines of {principal.id} give different limits or options")
        entries.append(entry)
    return entries


def _entry(where: str, fields: Sequence[str], defaults: KeyLimits) -> KeyEntry:
    if not _NAME.fullmatch(fields[0]):
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits, '.', '_' or '-'")
    match = _DIGEST.fullmatch(fields[1]) if len(fields) > 1 else None
    if match is None:
        raise ConfigError(
            f"{where}: write NAME sha256:<64 hex characters>, as `triptych key NAME` prints it; "
            "a key itself does not belong here"
        )
    limits, options, models = defaults, fields[2:], None
    for word in options:
        if word.startswith(MODELS):
            models = frozenset(filter(None, word.removeprefix(MODELS).split(",")))
        elif word != OPERATOR:
            limits = _with_limit(where, limits, word)
    if models is not None and not models:
        raise ConfigError(f"{where}: {MODELS} names no model: write {MODELS}NAME,NAME, or leave it out")
    return KeyEntry(bytes.fromhex(match[1]), Principal(fields[0], limits, OPERATOR in options, models))


def _with_limit(where: str, limits: KeyLimits, word: str) -> KeyLimits:
    name, _, value = word.partition("=")
    field = name.replace("-", "_")
    if "_" in name or field not in KeyLimits.__slots__ or not (value.isascii() and value.isdigit()):
        known = ", ".join(f"{slot.replace('_', '-')}=N" for slot in KeyLimits.__slots__)
        raise ConfigError(f"{where}: after the digest come {known}, {MODELS}NAME,NAME, {OPERATOR}")
    return replace(limits, **{field: int(value)})


def parse_plain_keys(text: str, limits: KeyLimits) -> list[KeyEntry]:
    """The entries of `--api-key`: keys with commas between them. Each is a principal of its own."""
    entries: list[KeyEntry] = []
    for key in filter(None, (word.strip() for word in text.split(","))):
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(
                f"--api-key: a key has at least {MIN_KEY_CHARS} characters; `triptych key NAME` makes one"
            )
        digest = hashlib.sha256(key.encode()).digest()
        # No name in a key file holds a colon: it cannot be taken for this one.
        entries.append(KeyEntry(digest, Principal(f"flag:{digest.hex()[:32]}", limits)))
    return entries


def new_key(name: str, *, operator: bool = False) -> tuple[str, str]:
    """A new key, and the line of a key file that lets it in. ConfigError for what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is not a valid name: use 1 to 64 letters, digits, '.', '_' or '-'")
    key = f"tk-{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    return key, f"{line} {OPERATOR}" if operator else line


logger = logging.getLogger(__name__)

#: A changed file counts after so long at the latest.
LOOK_SECONDS = 1.0
#: Minimum seconds between two searches for an unknown key: one that was just added opens at once, and a
#: flood of wrong keys costs few searches.
_MISS_SECONDS = 0.05
MAX_FILE_BYTES = 16 << 20
_Stamp = tuple[int, int, int]


class KeyRing:
    """Follows the key file without a restart: keys are added, replaced and withdrawn by editing it.

    ConfigError when the file cannot be used at the start. Later, a file that is gone or broken changes
    nothing: the keys read last stay in use, and the log says so.
    """

    def __init__(
        self,
        plain_keys: str,
        path: str,
        limits: KeyLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flag_entries = parse_plain_keys(plain_keys, limits)
        self._path = Path(path) if path else None
        self._limits = limits
        self._clock = clock
        self._stamp: _Stamp | None = None
        self._looked = clock()
        self._complained = -LOOK_SECONDS
        self._table = KeyTable(self._flag_entries)
        self._principals = self._table.principals
        if self._path is not None:
            self._read(self._path)
            if not len(self._table):
                raise ConfigError(f"--api-key-file {path} holds no key: `triptych key NAME` prints a line")

    @property
    def in_use(self) -> bool:
        """Whether requests need a key."""
        return self._path is not None or len(self._table) > 0

    @property
    def shared(self) -> bool:
        """Whether there are several principals, of which each has its share of the quotas."""
        return self._principals > 1

    def find(self, key: bytes) -> Principal | None:
        """Whose key it is; None when it opens nothing."""
        self._look(LOOK_SECONDS)
        principal = self._table.find(key)
        if principal is None and self._look(_MISS_SECONDS):
            principal = self._table.find(key)
        return principal

    def _look(self, after: float) -> bool:
        """Whether the file was read again: the last poll was `after` seconds ago, and it has changed."""
        now = self._clock()
        if self._path is None or now - self._looked < after:
            return False
        self._looked = now
        try:
            if _stamp(self._path) == self._stamp:
                return False
            self._read(self._path)
        except (OSError, ConfigError) as error:
            self._complain(error)
            return False
        logger.info("the key file has changed: %d keys are in use", len(self._table))
        return True

    def _complain(self, error: Exception) -> None:
        if self._looked - self._complained < LOOK_SECONDS:
            return
        self._complained = self._looked
        logger.error("the key file cannot be used, the keys read last stay in use: %s", error)

    def _read(self, path: Path) -> None:
        try:
            # Before the content: a change in between is then seen at the next poll.
            self._stamp = _stamp(path)
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ConfigError(f"--api-key-file {path} is above {MAX_FILE_BYTES >> 20} MiB")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from None
        try:
            entries = parse_key_lines(text, self._limits)
        except ConfigError as error:
            raise ConfigError(f"--api-key-file {path}, {error}") from None
        self._table = KeyTable([*self._flag_entries, *entries])
        self._principals = self._table.principals


def _stamp(path: Path) -> _Stamp:
    state = os.stat(path)
    return state.st_mtime_ns, state.st_size, state.st_ino
