"""The example of a package from outside, installed: its architecture is served as transformers answers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.engine.engine_cell import engine_cell
from support.zoo.cases import Case, assert_exact
from support.zoo.checkpoint import checkpoint
from support.zoo.engine import Served
from support.zoo.models import RECIPES
from support.zoo.own_processor import ask, pictures, reference
from triptych.base.config import MIB
from triptych.models.registry import family_of, load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

pytestmark = pytest.mark.timeout(180)

EXAMPLE = Path(__file__).parents[3] / "examples" / "model_package"
OVIS2 = "Ovis2ForConditionalGeneration"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package, built from a copy and installed without a network, on the import path."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(EXAMPLE, folder / "source")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", folder / "target", folder / "source"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "target")
        yield
        sys.modules.pop("triptych_ovis2", None)


@pytest.fixture(scope="module")
def served(installed: None) -> Served:
    """Both sides, as workers load them: by the registry."""
    path = checkpoint(OVIS2)
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32}
    decoder = load_decoder(path, **cpu, attn_implementation=ATTENTION_NAME)
    return Served(RECIPES[OVIS2], path, load_encoder(path, **cpu), decoder)


def test_the_packages_sides_are_the_ones_that_are_loaded(served: Served) -> None:
    assert type(family_of(served.path)).__name__ == "OutsideFamily"
    assert [type(side).__name__ for side in (served.encoder, served.decoder)] == [
        "Ovis2Encoder",
        "Ovis2Decoder",
    ]


@pytest.mark.parametrize("budget", [16, 4096], ids=["in chunks", "whole"])
def test_one_picture_two_and_none_are_answered_as_by_generate(served: Served, budget: int) -> None:
    case = Case.open(OVIS2, 16, served)
    assert len({token for reference in case.references for token in reference.token_ids}) >= 10
    with case.engine(budget, block_size=4) as cell:
        case.assert_exact(case.answer(cell))
        case.assert_exact(case.answer(cell))
        assert case.blank_answer(cell) != case.references[0].token_ids
        cell.assert_at_rest()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_pictures_through_its_own_processor(served: Served) -> None:
    with engine_cell(served, max_num_batched_tokens=1024, max_model_len=1024, kv_memory=64 * MIB) as cell:
        for count in (1, 2):
            token_ids, expected = reference(OVIS2, pictures(count), 16)
            prompt, rows = ask(OVIS2, served.encoder, served.decoder, pictures(count))
            assert list(prompt.token_ids) == token_ids
            (answer,) = cell.finish([served.built(cell, prompt, rows, 16)])
            assert_exact(expected, answer, f"{count} pictures")
