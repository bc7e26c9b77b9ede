"""Log records of all processes on stderr: lines of text, or one JSON object in each line.

Request ids go through all processes; prompts, media and keys are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import TypedDict, Unpack

from triptych.base.parent import set_variable

_FORMAT = "%(asctime)s %(levelname).1s %(service)s %(name)s: %(message)s"
#: The most characters of a message and of a traceback, which keeps its end: log collectors cut long lines.
_MESSAGE = 8192
_EXCEPTION = 16384


class LogFields(TypedDict, total=False):
    """What a JSON record says besides its message; in text it is part of the message.

    `request_id` is the proxy's, `label` the client's X-Request-ID, `worker` the address of the worker that
    the record is about.
    """

    request_id: str
    trace_id: str
    label: str
    attempt: int
    mm_hash: str
    worker: str
    status: int
    model: str
    tenant: str
    prompt_tokens: int
    completion_tokens: int
    items: int
    choices: int
    seconds: float


_FIELDS = tuple(LogFields.__annotations__)


def log_fields(**given: Unpack[LogFields]) -> dict[str, object]:
    """The `extra` of a log call; a key is shortened, and an empty text is left out."""
    if mm_hash := given.get("mm_hash"):
        given["mm_hash"] = short(mm_hash)
    return {name: value for name, value in given.items() if value != ""}


class JsonFormatter(logging.Formatter):
    """A formatter that makes one line of JSON of a record: whatever is in its texts, it stays one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._service,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage()[:_MESSAGE],
        }
        values |= {name: vars(record)[name] for name in _FIELDS if name in vars(record)}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)[-_EXCEPTION:]
        # ASCII alone: U+2028 and the like end a line for some readers. `str`: an odd value loses no record.
        return json.dumps(values, ensure_ascii=True, default=str)


def setup_logging(service: str, level: str = "info", log_format: str = "text") -> None:
    """Log to stderr, each record carrying the name of this process, such as `pd-0`."""
    handler = logging.StreamHandler(sys.stderr)
    # gRPC's C core writes lines of its own, one for everybody who fails to shake hands; what matters in them
    # comes as an exception, too.
    set_variable("GRPC_VERBOSITY", "NONE" if log_format == "json" else "ERROR")
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service))
        _log_what_python_prints()
    else:
        text = logging.Formatter(_FORMAT, datefmt="%H:%M:%S", defaults={"service": service})
        handler.setFormatter(text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("transformers", "asyncio", "uvicorn.access", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def logs_json() -> bool:
    """Whether this process has been set up to log JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_what_python_prints() -> None:
    """Makes records of Python's warnings and of exceptions that nothing handles."""
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("python").critical("an exception ends the process", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        thread = args.thread.name if args.thread is not None else "?"
        exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger("python").critical("an exception ends the thread %s", thread, exc_info=exc_info)


def short(key: str) -> str:
    """A key as logs may show it: enough to follow, too little to use."""
    return key[:12]
