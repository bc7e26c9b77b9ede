"""What decides a picture's tensors, for the namespace of the items' keys."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from triptych.models.generic import processor
from triptych.models.generic.processor import processor_settings


@pytest.mark.parametrize(
    ("name", "is_part"),
    [("Llama4ImageProcessor", True), ("Llama4ImageProcessorFast", True), ("SiglipImageProcessor", False)],
)
def test_torchvisions_version_is_part_where_there_is_no_processor_on_pil(
    name: str, is_part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name}))
    plain = processor_settings(tmp_path)
    assert "torchvision" not in plain
    monkeypatch.setattr(processor, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{package} 1.0")
    config = processor_settings(tmp_path)
    assert config == plain | ({"torchvision": "torchvision 1.0"} if is_part else {})
