"""Processors that run on torchvision alone are refused by name before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.zoo.processors import PROCESSORS
from support.zoo.torchvision import TORCHVISION
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.models.checkpoint import processor_libraries
from triptych.models.checkpoint.first_checks import check_encoder_model
from triptych.models.checkpoint.processor_libraries import check_processor_libraries


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    find = processor_libraries.find_spec
    monkeypatch.setattr(
        processor_libraries, "find_spec", lambda name: None if name == "torchvision" else find(name)
    )


def write(folder: Path, **settings: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("family", TORCHVISION)
def test_a_processor_of_torchvision_is_named_with_what_to_install(family: str, tmp_path: Path) -> None:
    processor, pictures, *_ = TORCHVISION[family]
    folder = write(tmp_path, processor_class=processor, image_processor_type=pictures.removesuffix("Pil"))
    words = r"its (image )?processor \w+ needs torchvision, which is not installed: install it beside the enc"
    with pytest.raises(ConfigError, match=words):
        check_processor_libraries(folder)


def test_what_pil_prepares_is_taken_and_so_is_what_no_file_names(tmp_path: Path) -> None:
    for row in PROCESSORS.values():
        named = row.image_processor.removesuffix("Pil")
        for pictures in (named, f"{named}Fast"):
            check_processor_libraries(
                write(tmp_path, processor_class=row.processor, image_processor_type=pictures)
            )
    check_processor_libraries(write(tmp_path, processor_class="Mine", image_processor={"a": 1}))
    check_processor_libraries(write(tmp_path, image_processor_type=3))


def test_torchvision_where_it_is_installed_is_not_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(processor_libraries, "find_spec", lambda name: object())
    check_processor_libraries(write(tmp_path, processor_class="PixtralProcessor"))


def test_an_encoder_worker_says_both_before_its_weights(tmp_path: Path) -> None:
    folder = build_checkpoint("llava", tmp_path / "model")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    write(folder, **settings, processor_class="PixtralProcessor")
    with pytest.raises(ConfigError, match=r"its processor PixtralProcessor needs torchvision"):
        check_encoder_model(folder, EncoderConfig())
    write(folder, **settings, use_image_id=True)
    with pytest.raises(ConfigError, match="around pictures: set use_image_id to false in"):
        check_encoder_model(folder, EncoderConfig())
    write(folder, **settings, use_image_id=False)
    check_encoder_model(folder, EncoderConfig())
