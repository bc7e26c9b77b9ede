"""Rules of the source tree: sizes of folders and files, one class per name, tests beside their modules."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("proxy", "encoder_worker", "pd_worker", "ec_connector")
#: Folders of `triptych/` that `tests/unit` does not name.
LAYERS = ("", "base/", "apps/")
#: What `tests/unit` calls a package whose folder is elsewhere.
ELSEWHERE = {service: service for service in SERVICES} | {
    "goodput": "triptych_bench/goodput",
    "simulator": "triptych_bench/simulator",
    "benchmarks": "benchmarks",
    "against_peer": "benchmarks/against_peer",
    "autoscale": "benchmarks/autoscale",
    "gpu": "benchmarks/gpu",
    "examples": "examples",
    "deploy": "deploy",
    "docs": "docs",
    "protos": "protos",
}


def _modules(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if "_pb2" not in path.name]


def _folders(*roots: str) -> list[Path]:
    """All folders with modules below the roots; what lies behind links is found by its own path."""
    found = []
    for root in roots:
        for folder in (ROOT / root, *(path for path in (ROOT / root).rglob("*") if path.is_dir())):
            linked = any(part.is_symlink() for part in (folder, *folder.parents) if part.is_relative_to(ROOT))
            if not linked and _modules(folder):
                found.append(folder)
    return found


def _product() -> list[Path]:
    return [path for folder in _folders(*SERVICES, "triptych") for path in _modules(folder)]


@pytest.mark.parametrize(
    "folder",
    _folders(*SERVICES, "triptych", "triptych_bench", "benchmarks", "examples", "tests"),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_folder_shows_its_architecture(folder: Path) -> None:
    assert len(_modules(folder)) <= 20
    assert all(path.read_text().count("\n") <= 450 for path in _modules(folder))


@pytest.mark.parametrize("package", [*SERVICES, "triptych"])
def test_a_package_has_few_files_in_its_root(package: str) -> None:
    assert len(_modules(ROOT / package)) <= 10


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name
        for path in _product()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_modules_tests_are_found_by_its_path() -> None:
    strange = []
    for folder in _folders("tests/unit"):
        parts = folder.relative_to(ROOT / "tests" / "unit").parts
        if parts:
            layers = [f"triptych/{layer}{parts[0]}" for layer in LAYERS]
            homes = [ELSEWHERE[parts[0]]] if parts[0] in ELSEWHERE else layers
            if not any((ROOT / home).joinpath(*parts[1:]).is_dir() for home in homes):
                strange.append(str(folder.relative_to(ROOT)))
    assert strange == []
