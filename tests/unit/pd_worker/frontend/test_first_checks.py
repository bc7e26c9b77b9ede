"""Flags of a PD worker that are refused before a process starts, in the words of the worker itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.models.checkpoint.first_checks import check_model_len
from triptych.pd_worker.frontend.first_checks import check_pd_flags

REFUSED = [
    (("--max-model-len", "999999"), "above the checkpoint's 4096 positions: lower it"),
    (("--tool-call-parser", "xml"), "--tool-call-parser 'xml' must be auto or one of"),
    (("--limit-mm-per-prompt", "image=4"), "--limit-mm-per-prompt: JSON is malformed"),
    (("--limit-mm-per-prompt", '{"picture": 4}'), "--limit-mm-per-prompt: Invalid enum value 'picture'"),
    (("--reasoning-parser", "deep"), "--reasoning-parser 'deep' must be one of"),
]


def with_config(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check(path: Path, **flags: Any) -> None:
    check_model_len(path, PDConfig(**flags))
    check_pd_flags(PDConfig(**flags))


@pytest.mark.parametrize(("flags", "words"), REFUSED)
def test_a_flag_that_no_pd_worker_takes_is_refused_by_name(flags: tuple[str, str], words: str) -> None:
    field = flags[0].removeprefix("--").replace("-", "_")
    value = int(flags[1]) if field == "max_model_len" else flags[1]
    with pytest.raises(ConfigError) as refused:
        check(DEMO_MODEL, **{field: value})
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"max_position_embeddings": 64}},
        {"max_position_embeddings": 64},
        {"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 32},
    ],
)
def test_a_length_is_compared_with_the_decoders_own_positions(config, tmp_path: Path) -> None:
    check(with_config(tmp_path, **config), max_model_len=64)
    with pytest.raises(ConfigError, match="above the checkpoint's 64 positions"):
        check(tmp_path, max_model_len=65)


@pytest.mark.parametrize(
    "flags", [{"engine": "vllm"}, {"engine_url": "http://127.0.0.1:1"}, {"device": "cuda"}]
)
def test_the_length_of_what_vllm_serves_is_left_to_it(flags: dict[str, str], tmp_path: Path) -> None:
    config = with_config(tmp_path, max_position_embeddings=64)
    check(config, max_model_len=65, **flags)


def test_positions_that_the_configuration_does_not_name_are_left_to_the_worker(tmp_path: Path) -> None:
    config = with_config(tmp_path, text_config={}, max_position_embeddings=64)
    check(config, max_model_len=65)


@pytest.mark.parametrize(("flags", "words"), REFUSED[:3])
def test_serve_says_so_in_its_only_line_and_starts_nothing(flags: tuple[str, str], words: str) -> None:
    command = [sys.executable, "-m", "triptych.apps.cli", "serve", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and words in line


def test_the_checks_import_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from triptych.base.config import PDConfig\n"
        "from triptych.models.checkpoint.first_checks import check_model_len\n"
        "from triptych.pd_worker.frontend.first_checks import check_pd_flags\n"
        f"check_model_len(Path({str(DEMO_MODEL)!r}), PDConfig(max_model_len=64))\n"
        "check_pd_flags(PDConfig(limit_mm_per_prompt='{\"image\": 4}'))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"
