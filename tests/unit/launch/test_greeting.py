from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.data.checkpoints import FAMILIES as PLACEHOLDER_FAMILIES
from support.data.checkpoints import build_checkpoint
from support.encdec.checkpoints import FAMILIES as CROSS_FAMILIES
from triptych.launch.greeting import first_request

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("whisper", "triptych transcribe "),
        ("bart", '"prompt": '),
        ("mbart", '"prompt": '),
        ("t5", '"prompt": '),
        ("trocr", '"multi_modal_data": {"image": '),
        ("qwen3_vl", "triptych ask "),
    ],
)
def test_the_line_to_paste_is_one_that_the_model_can_answer(family: str, words: str) -> None:
    line = first_request(build_checkpoint(family), "triptych", URL)
    assert words in line and URL in line
    if line.startswith("curl"):
        assert json.loads(line.partition("-d '")[2].removesuffix("'"))


def test_every_family_has_a_line_of_its_own_kind() -> None:
    for family in CROSS_FAMILIES:
        assert "triptych ask" not in first_request(build_checkpoint(family), "triptych", URL), family
    for family in PLACEHOLDER_FAMILIES:
        if family not in CROSS_FAMILIES:
            assert "triptych ask" in first_request(build_checkpoint(family), "triptych", URL), family


def test_a_folder_without_a_config_gets_the_line_for_pictures(tmp_path: Path) -> None:
    assert "triptych ask" in first_request(tmp_path, "triptych", URL)
