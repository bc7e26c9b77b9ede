"""Figures of the source tree: files, lines, functions, import chains, `Any`, repeated blocks, by package.

    python -m benchmarks structure [--before CHECKOUT] [--write]

`--before` sets a checkout of an earlier commit beside this one; `--write` puts the table into
docs/architecture.md, between its two markers.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- structure: begin -->", "<!-- structure: end -->"
#: The product, without generated code and links.
PACKAGES = ("proxy", "encoder_worker", "pd_worker", "ec_connector", "triptych", "benchmarks/simulator")
#: Lines that are repeated as a whole count as one block.
BLOCK = 8


@dataclass(frozen=True)
class Figures:
    """One package in one checkout; `loose` is the number of files in its fullest folder."""

    files: int
    loose: int
    lines: int
    median: int
    longest_file: int
    longest_function: int
    import_depth: int
    any_count: int
    repeated: int

    @staticmethod
    def names() -> list[str]:
        return [
            "files",
            "fullest folder",
            "lines",
            "median file",
            "longest file",
            "longest function",
            "import depth",
            "`Any`",
            "repeated blocks",
        ]

    def values(self) -> list[int]:
        return [
            self.files,
            self.loose,
            self.lines,
            self.median,
            self.longest_file,
            self.longest_function,
            self.import_depth,
            self.any_count,
            self.repeated,
        ]


def sources(root: Path, package: str) -> list[Path]:
    """The package's modules; generated ones, empty ones and those behind links are left out."""
    found = []
    for path in sorted((root / package).rglob("*.py")):
        linked = any((root / folder).is_symlink() for folder in path.relative_to(root).parents)
        if not linked and "_pb2" not in path.name and path.read_text().strip():
            found.append(path)
    return found


def measure(root: Path, package: str) -> Figures:
    paths = sources(root, package)
    texts = {path: path.read_text() for path in paths}
    lines = [text.count("\n") for text in texts.values()]
    folders = Counter(path.parent for path in paths)
    trees = {path: ast.parse(text) for path, text in texts.items()}
    return Figures(
        files=len(paths),
        loose=max(folders.values()),
        lines=sum(lines),
        median=int(statistics.median(lines)),
        longest_file=max(lines),
        longest_function=max(map(_longest_function, trees.values())),
        import_depth=_import_depth(root, package, trees),
        any_count=sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()),
        repeated=_repeated(texts.values()),
    )


def _longest_function(tree: ast.Module) -> int:
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return max(((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions), default=0)


def _import_depth(root: Path, package: str, trees: dict[Path, ast.Module]) -> int:
    """Modules on the longest chain of imports inside the package."""
    prefix = "triptych" if package == "triptych" else "triptych." + Path(package).name
    names = {
        prefix + "".join(f".{part}" for part in path.relative_to(root / package).with_suffix("").parts): path
        for path in trees
    }
    known = {name.removesuffix(".__init__"): path for name, path in names.items()}

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in _imports(trees[known[name]], known) - {name}), default=0)

    try:
        return max(map(depth, known))
    except RecursionError:
        raise SystemExit(f"{package}: imports form a cycle") from None


def _imports(tree: ast.Module, known: Iterable[str]) -> set[str]:
    """Modules of the package that are imported when the module is; not those that functions import."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(known)


def _repeated(texts: Iterable[str]) -> int:
    """Runs of BLOCK lines that stand in more than one place; overlapping runs count once."""
    places: defaultdict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, text in enumerate(texts):
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
        for at in range(len(lines) - BLOCK + 1):
            places[tuple(lines[at : at + BLOCK])].append((number, at))
    starts = sorted(place for found in places.values() if len(found) > 1 for place in found)
    runs = [b for a, b in pairwise([(-1, -2), *starts]) if a[0] != b[0] or b[1] > a[1] + 1]
    return len(runs) // 2


def table(after: Path, before: Path | None) -> list[str]:
    """Markdown: a row for each package, `then → now` in each cell where there is a `before`."""
    rows = ["| package | " + " | ".join(Figures.names()) + " |", "| --- " * (len(Figures.names()) + 1) + "|"]
    for package in PACKAGES:
        now = measure(after, package).values()
        then = measure(before, package).values() if before else now
        cells = [str(b) if a == b else f"{a} → {b}" for a, b in zip(then, now, strict=True)]
        rows.append(f"| `{package}` | " + " | ".join(cells) + " |")
    return rows


def write(page: Path, begin: str, end: str, lines: list[str]) -> None:
    """Replaces what stands between the two markers."""
    text = page.read_text()
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text("\n".join([head + begin, *lines, end + tail]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md")
    options = parser.parse_args()
    lines = table(ROOT, options.before)
    if options.write:
        write(PAGE, BEGIN, END, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
