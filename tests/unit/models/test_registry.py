"""Which family serves a checkpoint: its own, one of an installed package, or the adapter for any class."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from triptych.base.errors import ConfigError
from triptych.models.generic import DECODER, ENCODER
from triptych.models.registry import family_of


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an adapter for two architectures, one of which has a family of its own here."""
    (tmp_path / "their_adapter.py").write_text(
        "from triptych.models.generic import DECODER, ENCODER, KEYS\n\n\nclass OURS:\n"
        "    ENCODER, DECODER, KEYS = ENCODER, DECODER, KEYS\n\n\nclass BROKEN:\n    ENCODER = ENCODER\n"
    )
    info = tmp_path / "their_adapter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-adapter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[triptych.models]\nTheirModel = their_adapter:OURS\n"
        "LlavaForConditionalGeneration = their_adapter:OURS\n"
        "BrokenModel = their_adapter:BROKEN\nMovedModel = their_adapter:MOVED\nLostModel = their_lost\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_adapter", raising=False)


def folder(tmp_path: Path, **config: object) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_an_architecture_of_an_installed_package_is_served_by_its_adapter(tmp_path, installed):
    family = family_of(folder(tmp_path, architectures=["TheirModel"], model_type="theirs"))
    assert (type(family).__name__, family.name, family.decoder) == ("OutsideFamily", "theirs", DECODER)


def test_a_family_of_its_own_wins_over_an_adapter_from_outside(tmp_path: Path, installed: None) -> None:
    family = family_of(folder(tmp_path, architectures=["LlavaForConditionalGeneration"]))
    assert family.encoder is not ENCODER


def test_a_class_of_other_parts_than_its_family_has_goes_to_the_adapter_for_all(tmp_path: Path) -> None:
    parts = {"vision_config": {"model_type": "siglip_vision_model"}, "text_config": {"model_type": "llama"}}
    family = family_of(folder(tmp_path, architectures=["LlavaForConditionalGeneration"], **parts))
    assert (type(family).__name__, family.decoder) == ("GenericFamily", DECODER)


def test_an_adapter_that_lacks_a_side_is_named(tmp_path: Path, installed: None) -> None:
    lacks = "their_adapter:BROKEN for BrokenModel lacks DECODER, KEYS: install another version of their-"
    with pytest.raises(ConfigError, match=lacks):
        _ = family_of(folder(tmp_path, architectures=["BrokenModel"])).encoder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LostModel", "ModuleNotFoundError No module named 'their_lost'"),
        ("MovedModel", "AttributeError .*'MOVED'"),
    ],
)
def test_an_adapter_that_cannot_be_imported_is_one_line_with_the_remedy(tmp_path, installed, name, reason):
    remedy = "install another version of their-adapter, or remove it$"
    with pytest.raises(ConfigError, match=rf"^the adapter .*{name} cannot be imported \({reason}.*{remedy}"):
        _ = family_of(folder(tmp_path, architectures=[name])).keys


def test_any_other_architecture_goes_to_the_adapter_for_all(tmp_path: Path) -> None:
    family = family_of(
        folder(tmp_path, architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3")
    )
    assert (family.name, family.decoder) == ("gemma3", DECODER)


def test_an_architecture_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown architecture, NotThere: .*remote code is never run"):
        family_of(folder(tmp_path, architectures=["NotThere"]))


def test_a_config_without_an_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown architecture, something.*: give one of the classes"):
        family_of(folder(tmp_path, model_type="something"))
