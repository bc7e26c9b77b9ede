"""The commands of docs/vllm.md are those that tests/with_vllm/test_documented_commands.py runs."""

from __future__ import annotations

from collections import Counter

from support.vllm_engine.documented import Documented

RUN = {
    ("vllm", "serve"): 3,
    ("triptych", "pd"): 2,
    ("triptych", "serve"): 1,
    ("triptych", "namespace"): 1,
    ("triptych", "store"): 1,
}


def test_no_command_of_the_page_is_left_out() -> None:
    commands = Documented({}).commands()
    assert Counter((program, verb) for program, verb, *_ in commands) == RUN
    assert all(len(words) > 2 for words in commands)
