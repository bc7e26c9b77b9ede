"""Processors of any class: which one is taken, and why none is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

from support.zoo.checkpoint import checkpoint
from triptych.base.errors import ConfigError
from triptych.models.generic.processor import GenericProcessor


def test_a_processor_that_lacks_a_library_is_refused_by_that_and_no_other_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PixtralProcessor without torchvision: LLaVA's own, of the same model type, writes other prompts."""
    path = shutil.copytree(checkpoint("LlavaNextForConditionalGeneration"), tmp_path / "model")
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": "PixtralProcessor"}))
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (path / name).is_file():
            settings = json.loads((path / name).read_text())
            settings.pop("processor_class", None)
            (path / name).write_text(json.dumps(settings))

    class StandIn:
        _backends = ("torchvision",)

    monkeypatch.setattr(transformers, "PixtralProcessor", StandIn)
    with pytest.raises(ConfigError, match="its processor PixtralProcessor needs torchvision, .*: install it"):
        GenericProcessor(path, {"image": 1}, ())
