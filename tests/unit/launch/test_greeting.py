from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.options import serve_config
from triptych.apps.launch.greeting import first_request, greeting
from triptych.apps.launch.model_path import DEMO_MODEL

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


def test_a_cluster_with_tls_is_named_by_https_and_its_ca_is_mentioned(tmp_path: Path) -> None:
    files = ("--http-cert-file", str(tmp_path / "cert.pem"), "--http-key-file", str(tmp_path / "key.pem"))
    plain, secured = (greeting(serve_config(str(DEMO_MODEL), *words)) for words in ((), files))
    assert "http://127.0.0.1:8000" in plain and "--ca-file" not in plain
    assert "https://127.0.0.1:8000" in secured and "http://" not in secured and "--ca-file" in secured
