"""Output formats that vLLM holds an output to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from triptych.base.errors import RequestError
from triptych.base.types import JsonObject, OutputFormat
from triptych.pd_worker.frontend.input_processor import Formats

if TYPE_CHECKING:
    import numpy as np


class EngineFormat:
    """The output format of one request. It constrains nothing here: vLLM has a grammar of its own."""

    def __init__(self, output_format: OutputFormat) -> None:
        self.output_format = output_format
        self.error: RequestError | None = None

    def follow(self, output_ids: Sequence[int]) -> bool:
        # Output of vLLM's grammar, whose blanks are not those of ours.
        return True

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None:
        return None


class EngineFormats:
    """Makes the formats of requests. What the native engine refuses is refused here by the same names."""

    def __init__(self, native: Formats) -> None:
        self._native = native

    def state(self, output_format: OutputFormat) -> EngineFormat:
        """InvalidRequest for what is not supported."""
        self._native.state(output_format)
        return EngineFormat(output_format)


def structured_outputs(output_format: OutputFormat) -> JsonObject:
    """vLLM's `structured_outputs` of a format that has been checked."""
    match output_format.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            schema = json.loads(output_format.text)
            # The client's own settings for a parser are no part of JSON schema.
            schema.pop("x-guidance", None)
            return {"json": schema}
        case "regex":
            return {"regex": output_format.text}
    return {"choice": list(dict.fromkeys(output_format.choices))}
