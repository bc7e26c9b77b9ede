from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triptych.base.edges import load_edge


@pytest.fixture
def edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed edge, `an_edge`."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "an_edge"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "an_edge"
    folder.mkdir()
    (folder / "__init__.py").touch()
    return folder


def test_an_edge_that_is_installed_is_its_module(edge: Path) -> None:
    (edge / "routes.py").write_text("PATH = '/edge'")
    loaded = load_edge("an_edge.routes")
    assert loaded is not None and loaded.PATH == "/edge"


def test_an_edge_whose_package_or_module_is_not_installed_is_none(edge: Path) -> None:
    assert load_edge("an_edge.nothing") is None
    assert load_edge("no_edge_at_all.routes") is None


@pytest.mark.parametrize("missing", ["an_edge.other", "a_package_of_an_extra", "an"])
def test_what_an_installed_edge_misses_itself_is_an_error(edge: Path, missing: str) -> None:
    (edge / "broken.py").write_text(f"import {missing}")
    with pytest.raises(ModuleNotFoundError, match=missing):
        load_edge("an_edge.broken")
