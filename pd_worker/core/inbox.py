"""What other threads ask of the engine's thread, each command on its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from triptych.errors import InternalError, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """`run`, and what becomes of whom it concerns where it raises: the rest of its batch goes on."""

    run: Callable[[], None]
    failed: Callable[[RequestError], None]

    def carry_out(self) -> None:
        """Never raises an Exception."""
        try:
            self.run()
        except Exception:
            logger.exception("a command failed; only whom it concerns is harmed")
            try:
                self.failed(InternalError("the engine failed on a command for this request"))
            except Exception:
                logger.exception("nor could those be told")
