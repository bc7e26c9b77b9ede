"""Every class of the installed transformers: served exactly as `generate` answers, or refused by name.

TRIPTYCH_WRITE_MODELS=1 writes the table of docs/models.md in place of comparing it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from support.zoo.cases import Case
from support.zoo.engine import Served
from support.zoo.models import RECIPES
from support.zoo.status import ABSENT, REFUSED_CLASSES, REFUSED_RECIPES, SERVED, installed_classes, table
from triptych.base.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- classes: begin -->\n", "\n<!-- classes: end -->"
#: Architectures that have to be exact at the engine.
LEAST = 55


@pytest.mark.parametrize("case", SERVED, indirect=True)
def test_a_class_answers_as_generate(case: Case) -> None:
    varied = {token for reference in case.references for token in reference.token_ids}
    assert len(varied) >= 10, f"only {len(varied)} different tokens: they prove little"
    with case.engine(budget=33) as cell:
        case.assert_exact(case.answer(cell))
        assert case.blank_answer(cell) != case.references[0].token_ids, "blank rows change nothing"
        cell.assert_at_rest()


@pytest.mark.parametrize("case", SERVED, indirect=True)
def test_a_batch_of_pictures_has_the_rows_of_each_alone(case: Case) -> None:
    """To the bit where the matrix product of more rows is: in float32 it may sum in another order."""
    encoder, items = case.served.encoder, [case.served.recipe.item(number) for number in range(3)]
    prepared = [case.served.prepare(item) for item in items]
    for item, rows in zip(prepared, encoder.encode(prepared), strict=True):
        assert rows.shape == (item.rows, encoder.width)
        torch.testing.assert_close(rows, encoder.encode([item])[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in REFUSED_RECIPES if name in RECIPES])
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED_RECIPES[name].says):
        Served.open(name)


def test_every_class_of_the_installed_transformers_has_a_recipe_or_a_refusal() -> None:
    known = {recipe.architecture for recipe in RECIPES.values()} | set(REFUSED_CLASSES)
    assert sorted(set(installed_classes()) - known) == [], "new classes: give each a recipe or a refusal"
    assert not set(ABSENT) & set(installed_classes()), "it is there now: give it a recipe"


def test_enough_architectures_are_served() -> None:
    assert len({RECIPES[name].architecture for name in SERVED}) >= LEAST


def test_the_pages_table_is_what_is_served() -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("TRIPTYCH_WRITE_MODELS"):
        PAGE.write_text(text[:begin] + table() + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == table(), "write it with TRIPTYCH_WRITE_MODELS=1"
