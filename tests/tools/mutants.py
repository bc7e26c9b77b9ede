"""Mutation check: random small faults in the decision code, and whether the tests that name the module fail.

    python tests/tools/mutants.py --seed 32 --count 40 --out before.json
    python tests/tools/mutants.py --like before.json --out after.json
    python tests/tools/mutants.py --aimed tests/tools/aimed_faults.toml --out aimed.json

The second form puts the same faults in again, so that two states of the tests can be
compared over one product; the third one those of a list, each of which names the tests that have to fail.
Faults are put into a copy of the tracked files, never into the checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests_of import TestFiles

ROOT = Path(__file__).resolve().parents[2]
#: Where decisions are made.
DECIDES = re.compile(
    r"(proxy/(dispatcher|admission|splitter)\.py|proxy/(requests|encoders|pd|scaling)/|pd_worker/core/"
    r"|encoder_worker/(scheduler\.py|jobs/)|ec_connector/|triptych/(store|registry|apps/access)/).*"
)
#: A test file that starts services as processes.
PROCESSES = re.compile(
    r"^from support\.(processes\.(cluster|families|proxy_process|ray)|options)", re.MULTILINE
)
#: Test files that are tried before all others.
NEAREST = 3
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}


def faults(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Line, kind and application of every fault that the module can get."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield node.lineno, "comparison", lambda n=node: n.ops.__setitem__(0, COMPARED[type(n.ops[0])]())
        elif isinstance(node, ast.BoolOp):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield node.lineno, "and/or", lambda n=node, o=other: setattr(n, "op", o())
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            yield node.lineno, "arithmetic", lambda n=node: setattr(n, "op", COMPUTED[type(n.op)]())
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.lineno, "negation", lambda n=node: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
        elif isinstance(node, ast.Return) and getattr(node.value, "value", None) in (True, False):
            yield node.lineno, "constant", lambda n=node: setattr(n.value, "value", not n.value.value)
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            for index, child in enumerate(block if isinstance(block, list) else ()):
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call | ast.Await):
                    yield child.lineno, "omission", lambda b=block, i=index: b.__setitem__(i, ast.Pass())


def sites(root: Path) -> list[dict[str, Any]]:
    """Every fault of every module that decides, in a fixed order."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [
        {"path": name, "number": number, "line": line, "kind": kind}
        for name in sorted(listed.split())
        if name.endswith(".py") and DECIDES.fullmatch(name)
        for number, (line, kind, _) in enumerate(faults(ast.parse((root / name).read_text())))
    ]


def selection(tree: Path, path: str, limit: int) -> list[str]:
    """Tests of the module, then of its callers, then of its package: units before what runs in process.

    What starts processes is left out: it takes minutes, and its reader does not learn the line.
    """
    files = TestFiles(tree)
    named = (*files.of_module(path), *files.of_callers(path))
    found = dict.fromkeys([*named, *files.in_process(path), *files.of_package(path)])
    kinds = ("tests/unit/", "tests/integration/")
    here = [
        name for name in found if name.startswith(kinds) and not PROCESSES.search((tree / name).read_text())
    ]
    units = [name for name in here if name.startswith(kinds[0])]
    beside = [name for name in here if name not in units]
    # Half of them at least are in process, where there are so many: they see whether the caller calls.
    return [*units[: max(limit // 2, limit - len(beside))], *beside][:limit]


def verdict(tree: Path, site: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Puts the fault in, runs the tests, takes it out again. Alone and first runs what killed it before, then
    what is nearest to the module: most faults need no more, and to import all the rest takes longer."""
    file = tree / site["path"]
    text = file.read_text()
    module = ast.parse(text)
    list(faults(module))[site["number"]][2]()
    before = site.get("killer", "").partition("::")[0]
    tests = [*selection(tree, site["path"], options.files), *options.always]
    started, outcome = time.monotonic(), {"killed": False, "killer": ""}
    file.write_text(ast.unparse(ast.fix_missing_locations(module)))
    try:
        known = [before] if before and (tree / before).exists() else []
        for batch in (known, tests[:NEAREST], tests[NEAREST:]):
            if batch and not outcome["killed"]:
                outcome = _run(tree, batch, options)
    finally:
        file.write_text(text)
    return {**site, **outcome, "seconds": round(time.monotonic() - started), "tests": len(tests)}


def aimed(tree: Path, fault: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """As `verdict`, of a fault that is a piece of text in another's place."""
    file = tree / fault["path"]
    text = file.read_text()
    assert text.count(fault["was"]) == 1, f"{fault['path']} has {fault['was']!r} not once"
    file.write_text(text.replace(fault["was"], fault["now"]))
    started = time.monotonic()
    try:
        outcome = _run(tree, fault["tests"], options)
    finally:
        file.write_text(text)
    return {**fault, **outcome, "seconds": round(time.monotonic() - started)}


def _run(tree: Path, tests: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Whether one of the test files fails, and which test did."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu",
    ]
    try:
        done = subprocess.run(
            [*command, "-o", "timeout=90", *tests],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True, text=True, timeout=options.seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"killed": True, "killer": "", "code": -1}
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return {
        "killed": done.returncode in (1, 2, 3, 4),
        "killer": failed[1] if failed else "",
        "code": done.returncode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seed", type=int, default=32)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--files", type=int, default=24, help="test files per fault, at most")
    parser.add_argument(
        "--seconds", type=float, default=400, help="time for one run; running out of it is a kill"
    )
    parser.add_argument("--like", type=Path, help="a result whose faults are put in again")
    parser.add_argument("--aimed", type=Path, help="a list of faults in place of random ones")
    parser.add_argument("--only", nargs=2, type=int, default=(0, 1000), help="the first of them, and the end")
    parser.add_argument("--under", nargs="*", default=[""], help="draw from these folders or files alone")
    parser.add_argument("--always", nargs="*", default=[], help="test files that run for every fault, last")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    judge = verdict
    if options.aimed:
        judge = aimed
        drawn = tomllib.loads(options.aimed.read_text())["fault"]
    elif options.like:
        drawn = json.loads(options.like.read_text())
    else:
        among = [site for site in sites(ROOT) if site["path"].startswith(tuple(options.under))]
        drawn = random.Random(options.seed).sample(among, options.count)
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        for site in drawn[slice(*options.only)]:
            results.append(judge(tree, site, options))
            print(json.dumps(results[-1]), flush=True)
            options.out.write_text(json.dumps(results, indent=1))
    print(f"{sum(result['killed'] for result in results)} of {len(results)} faults killed")


if __name__ == "__main__":
    main()
