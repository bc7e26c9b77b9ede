"""New output of a request, one class from the engine to the client's connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic

import msgspec

from triptych.base.types import PositionLogprobs

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Logprobs = TypeVar("Logprobs", default=PositionLogprobs)
else:
    from typing import TypeVar

    Logprobs = TypeVar("Logprobs")


class Delta(msgspec.Struct, Generic[Logprobs], frozen=True, gc=False):
    """New output. A Struct, since one is made per token: a message takes ten times as long.

    `logprobs` are one per token where the request asked for them. `choice` is the proxy's, of a call with
    several.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] = ()
    choice: int = 0
    #: As in RequestEvent, inside the worker.
    request_id: str = ""
    attempt: int = 0
    proxy_id: str = ""
    #: Output tokens before these, earlier attempts included; inside the worker.
    position: int = 0
