"""The keys in use: those of the flag, and those of the key file as it is now."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from triptych.base.errors import ConfigError
from triptych.proxy.auth.keys import KeyLimits, KeyTable, Principal, parse_key_lines, parse_plain_keys

logger = logging.getLogger(__name__)

#: A changed file counts after so long at the latest.
LOOK_SECONDS = 1.0
#: Least time between two looks for an unknown key: one that was just added opens at once, and a flood of
#: wrong keys costs few looks.
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
        if (found := self._table.find(key)) is not None:
            return found
        self._look(_MISS_SECONDS)
        return self._table.find(key)

    def _look(self, after: float) -> None:
        """Reads the file again if it has changed and the last look was `after` seconds ago."""
        now = self._clock()
        if self._path is None or now - self._looked < after:
            return
        self._looked = now
        try:
            if _stamp(self._path) != self._stamp:
                self._read(self._path)
                logger.info("the key file has changed: %d keys are in use", len(self._table))
        except (OSError, ConfigError) as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if self._looked - self._complained < LOOK_SECONDS:
            return
        self._complained = self._looked
        logger.error("the key file cannot be used, the keys read last stay in use: %s", error)

    def _read(self, path: Path) -> None:
        try:
            # Before the content: a change in between is then seen at the next look.
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
