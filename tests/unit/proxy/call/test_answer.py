"""One choice's output: what was held back comes at its end."""

from __future__ import annotations

import pytest

from triptych.base.delta import Delta
from triptych.base.types import FinishReason, Usage
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.answer import ChoiceReader
from triptych.proxy.call.chat import Done, Timings
from triptych.proxy.call.tools import CallForm, ToolUse


@pytest.mark.parametrize("text", ["Wait <tool_cal", "Wait <tool_call>", "Wait\n\n "])
def test_what_a_model_has_begun_and_not_ended_as_a_call_is_content_at_the_end_of_the_stream(
    text: str,
) -> None:
    reader = ChoiceReader(ToolUse(form=CallForm.TAGGED))
    reader.begin(Admitted(prompt_token_ids=(1,), tool_format="hermes"))
    pieces = [piece for at in text for piece in reader.read(Delta(at, (5,)))]
    held = "".join(map(str, pieces))
    rest, reason = reader.end(Done(FinishReason.LENGTH, Usage(1, 1), Timings()))
    assert held != text, "nothing was held back"
    assert held + "".join(map(str, rest)) == text
    assert reason == "length"
