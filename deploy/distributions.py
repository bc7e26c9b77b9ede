"""What a release is made of, built by one command: `python deploy/distributions.py FOLDER [wheels|chart]`.

Wheels of triptych and triptych-bench, triptych's source archive, the chart's package, SHA256SUMS over all.
They are made of a copy of what git tracks: a build leaves folders behind, and what lies around is in no
release. The interpreter needs what pyproject.toml asks of a build; the chart is packaged by the SDK of
Helm, else by `helm`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
CHART = Path("deploy", "helm", "triptych")


def copy_tracked(folder: Path) -> None:
    """The files that git tracks, as they are in the work tree, links as links."""
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def build_wheels(source: Path, target: Path) -> None:
    """Two wheels and one source archive, by the build backend that both pyproject.toml name."""
    for project, hook in (("", "build_sdist"), ("", "build_wheel"), ("triptych_bench", "build_wheel")):
        call = f"import setuptools.build_meta as backend; backend.{hook}({str(target)!r})"
        subprocess.run([sys.executable, "-c", call], cwd=source / project, check=True, timeout=900)


def package_chart(source: Path, target: Path) -> None:
    """The chart as `helm install` takes it from a registry: triptych-VERSION.tgz."""
    try:
        from helm_python.chart import package
    except ImportError:
        words = ["helm", "package", str(source / CHART), "--destination", str(target)]
        subprocess.run(words, check=True, timeout=120)
    else:
        package(source / CHART, destination=target)


#: What is built by which word of the command line.
PARTS: dict[str, Callable[[Path, Path], None]] = {"wheels": build_wheels, "chart": package_chart}


def build(target: Path, parts: list[str]) -> None:
    """All parts into the folder; SystemExit where it holds something, which SHA256SUMS would vouch for."""
    target = target.resolve()
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise SystemExit(f"{target} is not empty: give a new folder")
    with TemporaryDirectory() as folder:
        copy_tracked(Path(folder))
        for part in parts:
            PARTS[part](Path(folder), target)
    files = sorted(target.iterdir())
    lines = [f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (target / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def main(words: list[str]) -> None:
    """Builds what the words say; SystemExit with the usage for others."""
    if not words or words[0].startswith("-") or not set(words[1:]) <= set(PARTS):
        raise SystemExit(f"usage: python deploy/distributions.py FOLDER [{'|'.join(PARTS)}]")
    build(Path(words[0]), words[1:] or list(PARTS))


if __name__ == "__main__":
    main(sys.argv[1:])
