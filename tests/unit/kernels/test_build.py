"""The kernels' library: compiled once for its sources; missing, it costs one line in the log."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.kernels import library

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of its own, and no memory of earlier loads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.kernel_library.cache_clear()
    yield tmp_path / "triptych" / "kernels"
    library.kernel_library.cache_clear()


def test_without_a_compiler_one_line_says_what_it_costs_and_the_remedy(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library, "INSTALLED", fresh)
    assert library.kernel_library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler; install g++" in caplog.text and "twice the CPU time" in caplog.text


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(library.BuildError, match="no room"):
        library.compile_library(fresh)
    assert list(fresh.iterdir()) == []


@pytest.mark.timeout(240)
def test_a_compiled_library_is_loaded_again_without_a_compiler(fresh, monkeypatch):
    if library.compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(library, "INSTALLED", fresh / "none")
    assert library.kernel_library() is not None
    assert [file.name for file in fresh.iterdir()] == [library.library_name()]
    library.kernel_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.kernel_library() is not None


def test_other_sources_are_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text("int a;")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    first = library.library_name()
    (tmp_path / "two.cpp").write_text("int b;")
    assert library.library_name() != first


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiler", ["g++", "no-such-compiler"])
def test_a_wheel_has_the_library_where_a_compiler_is(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, files.stdout.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target, follow_symlinks=False)
    command = [sys.executable, "-c", "import setuptools.build_meta as b; b.build_wheel('dist')"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = (source / "dist").iterdir()
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    made = shutil.which(compiler) is not None
    assert libraries == ([f"triptych/kernels/{library.library_name()}"] if made else [])
    assert wheel.name.endswith("-py3-none-any.whl") != made
    assert "-py3-none-" in wheel.name
