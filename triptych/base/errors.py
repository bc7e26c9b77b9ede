"""Triptych's errors, with their HTTP and gRPC status.

TriptychError
├── ConfigError          a flag, file or environment that cannot work; exit code 2
└── RequestError         one request cannot be served; carries status, code, param
    ├── InvalidRequest   400  the client's input; `param` names the field
    │   └── ContextTooLong    prompt and output above a model length
    ├── Unauthorized     401  the API key is missing or opens nothing
    ├── Forbidden        403  a foreign page or host, where no keys are in use
    ├── RequestTimeout   408  the request itself does not arrive
    ├── TooLarge         413  a limit on size
    ├── Overloaded       429  try again after `retry_after` seconds
    │   └── RateLimited       the limits of the client's API key
    ├── Unavailable      503  no worker can serve it now; try again after `retry_after` seconds
    ├── DeadlineExceeded 504  its deadline has passed
    └── InternalError    500  a bug, or a failure inside
"""

from __future__ import annotations

#: Seconds after which a client should try again, where nothing says it better.
RETRY_AFTER = 2.0


class TriptychError(Exception):
    """The root of every error that Triptych raises on purpose."""


class ConfigError(TriptychError):
    """The process cannot start as configured. The message names the flag and the remedy."""


class RequestError(TriptychError):
    """An error that ends one request. `message` is for the client: it names the field and the remedy."""

    status = 500
    code = "internal_error"
    grpc_status = "INTERNAL"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def drop_traceback(self) -> None:
        """Drops the traceback and causes: their frames would keep the request's body while it is answered."""
        self.__traceback__ = self.__context__ = self.__cause__ = None


class InvalidRequest(RequestError):
    status = 400
    code = "invalid_request_error"
    grpc_status = "INVALID_ARGUMENT"


class TooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class ContextTooLong(InvalidRequest):
    """A request longer than this worker allows; a worker with a larger limit may serve it."""

    code = "context_length_exceeded"


class RequestTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"
    grpc_status = "DEADLINE_EXCEEDED"


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"
    grpc_status = "UNAUTHENTICATED"


class Forbidden(RequestError):
    status = 403
    code = "forbidden"
    grpc_status = "PERMISSION_DENIED"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"
    grpc_status = "NOT_FOUND"


class ModelNotFound(NotFound):
    """A model that is not served, by OpenAI's code: clients with a list of models then try the next one."""

    code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class Overloaded(RequestError):
    status = 429
    code = "overloaded"
    grpc_status = "RESOURCE_EXHAUSTED"


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"


class Unavailable(RequestError):
    status = 503
    code = "unavailable"
    grpc_status = "UNAVAILABLE"


class DeadlineExceeded(RequestError):
    status = 504
    code = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"


class InternalError(RequestError):
    pass


_BY_CODE: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        Unauthorized,
        Forbidden,
        TooLarge,
        ContextTooLong,
        RequestTimeout,
        NotFound,
        ModelNotFound,
        MethodNotAllowed,
        Overloaded,
        RateLimited,
        Unavailable,
        DeadlineExceeded,
        InternalError,
    )
}


def error_from_code(
    code: str, message: str, *, param: str | None = None, retry_after: float | None = None
) -> RequestError:
    """The error that another process named by `code`; an unknown code is an InternalError."""
    return _BY_CODE.get(code, InternalError)(message, param=param, retry_after=retry_after)


def printable(text: str) -> str:
    """`text` without control characters, which end a log's line or move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def reason_of(error: BaseException) -> str:
    """What an error of foreign code says, on one line of 200 characters at most."""
    return " ".join(f"{type(error).__name__} {error}".split())[:200]
