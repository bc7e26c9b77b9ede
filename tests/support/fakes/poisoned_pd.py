"""A `triptych` command whose PD worker ends, without a word, at prompts that carry a mark.

`poison-prefill` ends it when the prompt is computed, `poison-after-N` when N output tokens are known,
`poison-door` when the prompt is read. Started as `python -m support.fakes.poisoned_pd pd MODEL …`.
"""

from __future__ import annotations

import os
import re
from typing import Any

from triptych.apps.cli import main
from triptych.pd_worker.frontend.input_processor import InputProcessor
from triptych.pd_worker.runner.model_runner import ModelRunner

EXIT_CODE = 86
_MARK = re.compile(rb"poison-(door|prefill|after-(\d+))")

#: Output tokens at which the worker ends, by request.
_ends_at: dict[str, int] = {}
_process = InputProcessor.process
_execute = ModelRunner.execute


def process(self: InputProcessor, message: Any, arrival: float) -> Any:
    if mark := _MARK.search(message.messages):
        if mark[1] == b"door":
            os._exit(EXIT_CODE)
        _ends_at[message.request_id] = int(mark[2] or 0)
    return _process(self, message, arrival)


def execute(self: ModelRunner, scheduled: Any) -> Any:
    for chunk in scheduled.chunks:
        request = chunk.state.request
        at = _ends_at.get(request.request_id)
        if at is not None and len(request.output_token_ids) >= at:
            os._exit(EXIT_CODE)
    return _execute(self, scheduled)


if __name__ == "__main__":
    InputProcessor.process = process  # type: ignore[method-assign]
    ModelRunner.execute = execute  # type: ignore[method-assign]
    main()
