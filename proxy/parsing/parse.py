"""How the bytes of a body become a request, as a parser process can be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from triptych.base.errors import RequestError, error_from_code

P = TypeVar("P")
Option = str | bool | int | float
#: Characters of what a verdict repeats: more than any error has.
_MAX_MESSAGE = 4096


@dataclass(frozen=True, slots=True)
class Parse(Generic[P]):
    """One way to parse: `function(raw, **options)`, which raises a RequestError for what it refuses.

    A process is told it by names: the function is one of a module, and the options are plain values.
    """

    function: Callable[..., P]
    options: Mapping[str, Option] = field(default_factory=dict)

    def __call__(self, raw: bytes) -> P:
        return self.function(raw, **self.options)

    @property
    def order(self) -> ParseOrder:
        return ParseOrder(self.function.__module__, self.function.__qualname__, dict(self.options))


class ParseOrder(msgspec.Struct):
    """A `Parse` by the names of its function."""

    module: str
    name: str
    options: dict[str, Option]


class ParseVerdict(msgspec.Struct):
    """What a parser process says of a body: the error that it ends with, if any.

    Of the request it says nothing: whoever asked parses a body that is sound once more. `fault` is the
    traceback of an error that is none of the client's, for the log.
    """

    code: str = ""
    message: str = ""
    param: str | None = None
    fault: str = ""

    @classmethod
    def of(cls, error: RequestError) -> ParseVerdict:
        param = None if error.param is None else error.param[:_MAX_MESSAGE]
        return cls(error.code, error.message[:_MAX_MESSAGE], param)

    @property
    def error(self) -> RequestError | None:
        return error_from_code(self.code, self.message, param=self.param) if self.code else None
