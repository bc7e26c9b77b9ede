"""The page of promises: what each costs in lines, and which test proves it.

    python tests/tools/promises.py

writes docs/promises.md from promises.toml; tests/unit/docs/test_promises.py compares it.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "promises.md"
#: Where the product is; what `triptych/` links to is found by its own path.
PRODUCT = ("proxy", "encoder_worker", "pd_worker", "ec_connector", "protos", "triptych")
PRODUCT += ("triptych_bench", "deploy")
WRITTEN = {".py", ".cpp", ".h", ".proto", ".js", ".css", ".html", ".sh", ".yaml", ".tpl", ".toml"}
WRITTEN |= {".Dockerfile"}
#: Where a test's folder below tests/unit or tests/integration is looked for in the product.
HOMES = ("", "benchmarks/", "triptych_bench/", "triptych/", "triptych/base/", "triptych/apps/")
HEAD = """# Promises

What the product promises, to whom, and what each promise costs. Lines are counted by
`tests/tools/promises.py`, in hundreds; every file of the product belongs to exactly one row. Who adds a
promise names in the commit one that becomes smaller, or says why none does.

"""
COLUMNS = ("promise", "to whom", "product", "tests", "proved by", "a library or peer instead")


class Promise(NamedTuple):
    """A capability that somebody may count on."""

    name: str
    whom: str
    promise: str
    files: list[str]
    proof: str
    instead: str
    tests: list[str] = []


def promises(table: Path = TABLE) -> list[Promise]:
    return [Promise(**row) for row in tomllib.loads(table.read_text(encoding="utf-8"))["promise"]]


def files(root: Path, *folders: str) -> Iterator[str]:
    """What is written by hand in the folders, by its path from the root; without what is behind links."""
    for folder in folders:
        for path in sorted((root / folder).iterdir()):
            name = f"{folder}/{path.name}"
            if path.is_dir():
                if not path.is_symlink() and path.name != "__pycache__":
                    yield from files(root, name)
            elif path.suffix in WRITTEN and "_pb2" not in path.name:
                yield name


def leads_to(path: str, name: str) -> bool:
    """Whether the path is the file, its folder ("proxy/*") or one further up ("proxy/http/")."""
    if path.endswith("/*"):
        return name.rpartition("/")[0] == path.removesuffix("/*")
    return name.startswith(path) if path.endswith("/") else name == path


def owner(name: str, paths: dict[str, str]) -> str | None:
    """The promise whose longest path leads to the file."""
    found = [path for path in paths if leads_to(path, name)]
    return paths[max(found, key=len)] if found else None


def mirrored(name: str, is_folder: Callable[[str], bool]) -> str | None:
    """The module that a test is named after; it need not exist, its folder does."""
    *folders, file = name.split("/")
    if folders[1:2] not in (["unit"], ["integration"]):
        return None
    folder = "/".join(folders[2:])
    home = next((home for home in HOMES if folder and is_folder(home + folder)), "triptych/base/")
    return f"{home}{folder}/".replace("//", "/") + file.removeprefix("test_")


def test_owner(name: str, promised: list[Promise]) -> str | None:
    """The promise that names the test, or that of the module it mirrors."""
    named = owner(name, {path: promise.name for promise in promised for path in promise.tests})
    module = mirrored(name, lambda folder: (ROOT / folder).is_dir() and not (ROOT / folder).is_symlink())
    if named is None and module is not None:
        return owner(module, {path: promise.name for promise in promised for path in promise.files})
    return named


def lines(names: Iterator[str], owner_of: Callable[[str], str | None]) -> Counter[str | None]:
    """Lines by promise; None is what belongs to several."""
    counted: Counter[str | None] = Counter()
    for name in names:
        counted[owner_of(name)] += (ROOT / name).read_bytes().count(b"\n")
    return counted


def hundreds(count: int) -> str:
    return f"{round(count, -2):,}"


def proof(row: Promise) -> str:
    file, _, name = row.proof.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})"


def page() -> str:
    """The page as it should be."""
    promised = promises()
    paths = {path: promise.name for promise in promised for path in promise.files}
    product = lines(files(ROOT, *PRODUCT), lambda name: owner(name, paths))
    tests = lines(files(ROOT, "tests"), lambda name: test_owner(name, promised))
    rows = [
        f"| **{row.name}**: {row.promise} | {row.whom} "
        f"| {hundreds(product[row.name])} | {hundreds(tests[row.name])} | {proof(row)} | {row.instead} |"
        for row in promised
    ]
    total = f"| all {len(promised)} | | {hundreds(product.total())} | {hundreds(tests.total())} | | |"
    shared = f"| tests and helpers of several promises | | | {hundreds(tests[None])} | | |"
    heads = [f"| {' | '.join(COLUMNS)} |", "| --- | --- | ---: | ---: | --- | --- |"]
    return HEAD + "\n".join((*heads, *rows, shared, total)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
