"""What can become of a call of the vLLM server, beside an answer."""

from __future__ import annotations


class EngineError(Exception):
    """The root of all failures of a call; the message is for logs."""


class EngineUnreachable(EngineError):
    """No connection, or one that broke or fell silent before the answer was whole."""


class EngineSilent(EngineUnreachable):
    """No answer in time, over a connection that may still stand."""


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
    """The server has ended, with all of its requests."""
