"""Checkpoints that cannot be served: one line with the remedy, before a weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from support.zoo.checkpoint import checkpoint
from triptych.apps.cli.app import app
from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.encoder_worker.loading import load_tower
from triptych.models.generic import decoder, encoder
from triptych.pd_worker.native import load_model

Damage = Callable[[Path], None]


def without(*patterns: str) -> Damage:
    """Deletes files."""

    def damage(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return damage


def changed(file: str, *way: str, **values: Any) -> Damage:
    """Sets keys of a JSON file, of the object at the end of `way`."""

    def damage(folder: Path) -> None:
        whole = part = json.loads((folder / file).read_text())
        for key in way:
            part = part[key]
        part |= values
        (folder / file).write_text(json.dumps(whole))

    return damage


text_changed = partial(changed, "config.json", "text_config")
#: What is wrong, the error's words, and the workers that have to refuse it as `triptych check` does.
ROWS: dict[str, tuple[Damage, str, str]] = {
    "processor": (
        without("preprocessor_config.json"),
        "has no image processor: give MODEL=/folder with preprocessor_config.json",
        "encoder",
    ),
    "tokenizer": (
        without("tokenizer*", "vocab*"),
        "has no tokenizer: put its tokenizer.json into the folder",
        "encoder pd",
    ),
    "template": (
        without("chat_template*"),
        "has no chat template: put a chat_template.jinja into the folder",
        "pd",
    ),
    "placeholders": (
        changed("processor_config.json", image_seq_length=7),
        "its processor writes 35 placeholders for an item of which its tower makes 20 rows: correct",
        "encoder",
    ),
    "code of its own": (
        changed("config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        r"needs code of its own \(auto_map in config.json\), which is never run: give",
        "encoder pd",
    ),
    "class of its own": (
        changed("config.json", architectures=["MineForConditionalGeneration"]),
        "unknown architecture, MineForConditionalGeneration.*: give one of those, or install",
        "encoder pd",
    ),
    "rope type": (
        text_changed(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "names the rope type 'spiral', which transformers .* does not have: upgrade",
        "encoder pd",
    ),
    "layer type": (
        text_changed(layer_types=["holographic", "holographic"]),
        "names the layer type 'holographic', which transformers .* does not have: upgrade",
        "encoder pd",
    ),
}


def load(side: str, folder: Path) -> None:
    if side == "encoder":
        load_tower(EncoderConfig(model=str(folder), dtype="float32"))
    else:
        load_model(PDConfig(model=str(folder), dtype="float32", kv_memory=1 << 24))


def no_weights(*_: object, **__: object) -> None:
    raise AssertionError("a weight is read")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("wrong", ROWS)
def test_what_cannot_be_served_is_one_line_with_the_remedy_before_the_weights(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, words, sides = ROWS[wrong]
    for module in (encoder, decoder):
        monkeypatch.setattr(module, "load_side", no_weights)
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("InternVLForConditionalGeneration"), folder)
    damage(folder)
    shown = CliRunner().invoke(app, ["check", str(folder)])
    assert isinstance(shown.exception, ConfigError), shown.exception
    failures = [shown.exception]
    for side in sides.split():
        with pytest.raises(ConfigError) as error:
            load(side, folder)
        failures.append(error.value)
    for failure in failures:
        assert "\n" not in str(failure)
    with pytest.raises(ConfigError, match=words):
        raise failures[0]
    assert len({str(failure) for failure in failures}) == 1
