"""TOML files of systems, loads and cells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.baselines.matrix import Matrix, expand, read_matrix
from support.engine.cells import ENVIRONMENT, TOML
from triptych.errors import ConfigError

COMMITTED = sorted((Path(__file__).parents[3] / "benchmarks" / "baselines").glob("*.toml"))


def read(folder: Path, text: str) -> Matrix:
    path = folder / "matrix.toml"
    path.write_text(text)
    return read_matrix(path, ENVIRONMENT)


def test_variables_of_the_environment_are_put_in_and_those_of_the_runner_stay(tmp_path):
    matrix = read(tmp_path, TOML)
    assert matrix.model == "/models/toy"
    assert matrix.named("vllm").env == {"FOLDER": "/peer/lib"}
    assert matrix.named("vllm").commands == (("serve", "--port", "${PORT}", "${MODEL}"),)
    assert dict(matrix.slo("mix").limits) == {"ttft": 200.0, "tpot": 50.0}


def test_a_variable_that_is_not_set_is_named_with_its_place(tmp_path):
    path = tmp_path / "matrix.toml"
    path.write_text(TOML)
    with pytest.raises(ConfigError, match=r"system 'vllm': env.FOLDER needs the environment variable PEER"):
        read_matrix(path, {"MODELS": "/m"})


def test_two_variables_in_a_word_are_both_replaced():
    assert expand("${A}/x/${B}:${C}", {"A": "1", "B": "2"}, "here", keep=("C",)) == "1/x/2:${C}"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('launch = "1E1PD"', 'launch = "1X"', "'1X' is no shape"),
        ('launch = "1E1PD"', 'launch = "1E1PD"\npause = true', "pause is for commands"),
        ('launch = "1E1PD"', "", "system 'colocated' needs either launch or commands"),
        ('url = "http://127.0.0.1:${PORT}"', "", "system 'vllm' has commands and no url"),
        (
            'kind = "search"',
            'kind = "serach"',
            r"cells\[2\].kind: 'serach' is not known: use one of capacity",
        ),
        ('systems = ["vllm", "epd-shared"]', 'systems = ["vlm"]', r"cells\[3\].systems: 'vlm' is not known"),
        ('loads = ["text", "mix"]', 'loads = ["texts"]', r"cells\[1\].loads: 'texts' is not known"),
        ("repeats = 2", "repeat = 2", "unknown field `repeat`"),
        ("repeats = 2", 'repeats = "two"', r"Expected `int`, got `str` - at `\$.repeats`"),
        ("repeats = 2", "repeats = ", "Invalid value"),
        ("repeats = 2", "tail = 95", "tail 95: use 90 or 99"),
        ('name = "toy"', 'name = "a toy"', "name 'a toy' is part of file names"),
        ('name = "vllm"', 'name = "epd-shared"', "two systems have one name"),
        ('text = "ttft:200 tpot:50"', 'txt = "ttft:200"', "--workload 'txt' is not known"),
        ('text = "ttft:200 tpot:50"', 'text = "ttft"', "'ttft' is no objective"),
        ('text = "ttft:200 tpot:50"', 'text = ""', "loads.text has no SLO"),
        ('loads = ["text", "mix", "reuse-50", "images-4"]', 'loads = ["mix"]', "load 'text' has fixed cells"),
    ],
)
def test_an_invalid_value_is_an_error_that_names_its_field(tmp_path, old, new, told):
    assert old in TOML
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, TOML.replace(old, new, 1))


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.toml: No such file"):
        read_matrix(tmp_path / "nothing.toml")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_files_are_right(path):
    names = re.findall(r"\$\{(\w+)\}", path.read_text())
    matrix = read_matrix(path, dict.fromkeys(names, "/somewhere"))
    assert matrix.name == path.stem
    assert {matrix.roles.ours, matrix.roles.colocated, matrix.roles.other} <= {s.name for s in matrix.system}


def test_there_are_committed_files():
    assert {path.stem for path in COMMITTED} >= {"small", "tiny"}
