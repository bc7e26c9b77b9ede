"""What can become of a call of vLLM, beside an answer."""

from __future__ import annotations

#: Characters of a message of vLLM that go into ours.
MOST_CHARS = 500


class EngineError(Exception):
    """The root of all failures of a call; the message is for logs."""


class EngineUnreachable(EngineError):
    """The engine is dead, or there is no connection, or one that broke before the answer was whole."""


class EngineSilent(EngineUnreachable):
    """No answer in time, from an engine that may still live."""


class EngineRejected(EngineError):
    """An answer 4xx: the same request would be refused again. `message` is vLLM's own."""

    def __init__(self, status: int, message: str, param: str = "") -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.param = param


class EngineBusy(EngineError):
    """An answer 429 or 503: the same request may be taken later."""


class EngineFailed(EngineError):
    """An answer 5xx, or an error event: vLLM has failed on this request, for example for a lost embedding."""


class EngineGarbage(EngineError):
    """An answer that is not of the endpoint."""


class EngineLost(Exception):
    """The engine has ended, with all of its requests."""


def error_of_status(status: int, message: str, param: str = "") -> EngineError:
    """The failure that an HTTP status names."""
    message = printable(message)
    if status in (429, 503):
        return EngineBusy(f"{status}: {message}")
    if 400 <= status < 500:
        return EngineRejected(status, message, param)
    if status >= 500:
        return EngineFailed(f"{status}: {message}")
    return EngineGarbage(f"status {status}")


def printable(text: str) -> str:
    """One line of a foreign text."""
    line = " ".join(text.split())[:MOST_CHARS]
    return "".join(char if char.isprintable() else "?" for char in line)
