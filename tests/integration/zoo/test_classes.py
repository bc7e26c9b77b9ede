"""Classes: answers, rows, and recipes or refusals of all."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from click.testing import CliRunner

from support.zoo.cases import Case
from support.zoo.checkpoint import checkpoint
from support.zoo.models import RECIPES
from support.zoo.recipe import VOCAB_SIZE
from support.zoo.status import (
    ABSENT,
    NOT_RUN,
    OWN_PROCESSOR_REFUSED,
    SERVED,
    WITHOUT_RECIPE,
    installed_classes,
    table,
)
from triptych.apps.cli.app import app
from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.encoder_worker.loading import load_tower
from triptych.models.checkpoint.architectures import check_architecture
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.folder import read_config
from triptych.models.generic import decoder, encoder
from triptych.models.generic.examine import examine
from triptych.models.registry import GenericFamily, family_of
from triptych.pd_worker.native import load_model

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- classes: begin -->\n", "\n<!-- classes: end -->"
#: Architectures that have to be exact at the engine.
MINIMUM = 55


@pytest.mark.parametrize("case", SERVED, indirect=True)
def test_a_class_answers_as_generate(case: Case) -> None:
    varied = {token for reference in case.references for token in reference.token_ids}
    assert len(varied) >= 10, f"only {len(varied)} different tokens: they prove little"
    with case.engine(budget=33) as cell:
        case.assert_exact(case.answer(cell))
        assert case.blank_answer(cell) != case.references[0].token_ids, "blank rows change nothing"
        cell.assert_at_rest()


@pytest.mark.parametrize("case", SERVED, indirect=True)
def test_a_texts_positions_are_those_of_the_classs_own_forward(case: Case) -> None:
    decoder = case.served.decoder
    for seed, length in enumerate((1, 2, 9, 130)):
        draw = torch.Generator().manual_seed(seed)
        drawn = torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist()
        ids = [token for token in drawn if token not in decoder.row_token_ids] or [3]
        try:
            counted = decoder.prompt_inputs(ids, ())
        except InvalidRequest:
            assert not decoder.counts_text, "the class takes no text without a picture"
            continue
        with mock.patch.object(decoder, "counts_text", new=False):
            captured = decoder.prompt_inputs(ids, ())
        torch.testing.assert_close(counted.positions, captured.positions, atol=0, rtol=0)
        assert (counted.delta, counted.spans) == (captured.delta, captured.spans)
        assert counted.inputs.keys() == captured.inputs.keys()


@pytest.mark.parametrize("case", SERVED, indirect=True)
def test_a_batch_of_pictures_has_the_rows_of_each_alone(case: Case) -> None:
    """To the bit where the matrix product of more rows is: in float32 it may sum in another order."""
    encoder, items = case.served.encoder, [case.served.recipe.item(number) for number in range(3)]
    prepared = [case.served.prepare(item) for item in items]
    for item, rows in zip(prepared, encoder.encode(prepared), strict=True):
        assert rows.shape == (item.rows, encoder.width)
        torch.testing.assert_close(rows, encoder.encode([item])[0], atol=2e-5, rtol=0)


def config_of(name: str) -> Any:
    """A class's config: its recipe's, or the default one."""
    cls = getattr(transformers, name)
    recipe = next((recipe for recipe in RECIPES.values() if recipe.architecture == name), None)
    return cls.config_class(**copy.deepcopy(recipe.config if recipe else {}), architectures=[name])


def test_what_the_examination_refuses_is_refused_by_its_name_before_the_first_process(tmp_path: Path) -> None:
    """By the same class names, and only those; `NOT_RUN` are no models of a published checkpoint's config."""
    examined, named = {}, {}
    for name in sorted(set(installed_classes()) - set(NOT_RUN)):
        folder = tmp_path / name
        config_of(name).save_pretrained(folder)
        try:
            if isinstance(family_of(folder), GenericFamily):
                examine(load_config(folder))
        except ConfigError as error:
            examined[name] = str(error)
        try:
            check_architecture(folder, read_config(folder))
        except ConfigError as error:
            named[name] = str(error)
    assert len(examined) >= 25
    # What the examination of a processor refuses, not of a class: `test_own_processors.py`.
    rewriting = set(OWN_PROCESSOR_REFUSED) & set(installed_classes())
    assert set(named) - rewriting == set(examined), {
        name: examined.get(name, "taken") for name in (set(named) ^ set(examined)) - rewriting
    }
    assert rewriting <= set(named)
    for name, said in named.items():
        assert re.search(rf"{name} (cannot be served \(.+\)|takes text alone): .*(vLLM|SGLang|install)", said)


def test_every_class_of_the_installed_transformers_has_a_recipe_or_a_refusal() -> None:
    known = {recipe.architecture for recipe in RECIPES.values()} | set(WITHOUT_RECIPE)
    assert sorted(set(installed_classes()) - known) == [], "new classes: give each a recipe or a refusal"
    assert not set(ABSENT) & set(installed_classes()), "it is there now: give it a recipe"


def test_enough_architectures_are_served() -> None:
    assert len({RECIPES[name].architecture for name in SERVED}) >= MINIMUM


def test_the_pages_table_is_what_is_served() -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("TRIPTYCH_WRITE_MODELS"):
        PAGE.write_text(text[:begin] + table() + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == table(), "write it with TRIPTYCH_WRITE_MODELS=1"


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
        "unknown architecture, MineForConditionalGeneration.*: give one of the classes in docs/models",
        "encoder pd",
    ),
    "value, of a class with code that nobody needs": (
        changed("config.json", auto_map={"AutoConfig": "mine.Config"}, text_config="none"),
        "its config.json does not fit its model type: .*: correct it",
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
def test_what_cannot_be_served_is_one_line_with_the_remedy_before_the_weights(wrong, tmp_path, monkeypatch):
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
