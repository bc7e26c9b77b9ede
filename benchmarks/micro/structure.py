"""Figures of the source tree by package: lines, files, short files, longest file and function, `Any`.

    python -m benchmarks structure [--before CHECKOUT] [--write]

`--before` sets a checkout of an earlier commit beside this one; `--write` puts the table into
docs/architecture.md, between its two markers.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- structure: begin -->", "<!-- structure: end -->"
PACKAGES = ("proxy", "encoder_worker", "pd_worker", "ec_connector", "triptych", "benchmarks", "tests")
#: Files below so many lines are counted apart.
SHORT = 60
NAMES = ("lines", "files", f"below {SHORT} lines", "longest file", "longest function", "`Any`")


def sources(root: Path, package: str) -> Iterator[str]:
    """The texts of a package's modules, without generated ones, empty ones and those behind links."""
    for path in sorted((root / package).rglob("*.py")):
        linked = any((root / folder).is_symlink() for folder in path.relative_to(root).parents)
        if not linked and "_pb2" not in path.name and (text := path.read_text()).strip():
            yield text


def measure(root: Path, package: str) -> list[int]:
    """The figures of NAMES."""
    texts = list(sources(root, package))
    lines = [text.count("\n") for text in texts] or [0]
    short = sum(count < SHORT for count in lines)
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    anys = sum(len(re.findall(r"\bAny\b", text)) for text in texts)
    return [sum(lines), len(texts), short, max(lines), max(functions, default=0), anys]


def table(after: Path, before: Path | None) -> list[str]:
    """Markdown: a row for each package, `then → now` in each cell where there is a `before`."""
    rows = ["| package | " + " | ".join(NAMES) + " |", "| --- " * (len(NAMES) + 1) + "|"]
    for package in PACKAGES:
        now = measure(after, package)
        then = measure(before, package) if before else now
        cells = [str(b) if a == b else f"{a} → {b}" for a, b in zip(then, now, strict=True)]
        rows.append(f"| `{package}` | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md")
    options = parser.parse_args()
    lines = table(ROOT, options.before)
    if options.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([head + BEGIN, *lines, END + rest.partition(END)[2]]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
