"""A model that the workers would refuse is refused by `triptych check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from triptych.config import ClusterConfig
from triptych.errors import ConfigError
from triptych.launch.check import check_model


def _no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def _no_template(path: Path) -> None:
    for file in path.glob("chat_template*"):
        file.unlink()
    config = path / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values.pop("chat_template", None)
    config.write_text(json.dumps(values))


def _no_processor_size(path: Path) -> None:
    (path / "preprocessor_config.json").write_text(
        '{"size": 5, "image_processor_type": "Qwen2VLImageProcessor"}'
    )


@pytest.mark.parametrize(
    ("damage", "named"),
    [(_no_tokenizer, "tokenizer"), (_no_template, "chat template"), (_no_processor_size, "own sample")],
)
def test_what_the_workers_would_refuse_does_not_fit(
    damage: Callable[[Path], None], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    check_model(ClusterConfig(model=str(path)))
    assert "It fits." in capsys.readouterr().out
    damage(path)
    with pytest.raises(ConfigError, match=named):
        check_model(ClusterConfig(model=str(path)))
    assert "It fits." not in capsys.readouterr().out
