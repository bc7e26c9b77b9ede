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
#: Heap blocks of exactly the picture's and the result's size: a byte read or written beside them is seen.
HARNESS = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
extern "C" int triptych_picture_levels(const uint8_t *, int, int, int, int, int, int, int, int, int,
                                       uint8_t *);
extern "C" int triptych_look_up(const uint8_t *, size_t, size_t, size_t, size_t, int, const void *, void *);
extern "C" int triptych_copy_finite(const uint8_t *, uint8_t *, size_t, int, uint32_t, int);
int main() {
  for (size_t bytes = 0; bytes < 400; bytes += 4)
    for (int size = 2; size < 5; size += 2)
      for (int stream = 0; stream < 2; stream++) {
        uint8_t *from = (uint8_t *)calloc(bytes, 1), *to = (uint8_t *)malloc(bytes);
        if (triptych_copy_finite(from, to, bytes, size, size == 2 ? 0x7f80 : 0x7f800000, stream)) return 3;
        free(from); free(to);
      }
  int sizes[][4] = {{1, 1, 1, 1}, {1, 1, 64, 48}, {97, 61, 97, 61}, {97, 61, 64, 61}, {97, 61, 97, 96},
                    {97, 61, 160, 128}, {420, 1400, 384, 288}, {1, 150, 32, 64},
                    {150, 1, 64, 32}, {640, 480, 1, 1}};
  for (auto &s : sizes)
    for (int filter = 1; filter < 6; filter++)
      for (int set = 0; set < 3; set++) {
        size_t in = 3 * s[0] * s[1], out = 3 * s[2] * s[3];
        uint8_t *pixels = (uint8_t *)malloc(in), *levels = (uint8_t *)malloc(out);
        float table[3][256], *values = (float *)malloc(2 * out * sizeof(float));
        for (size_t i = 0; i < in; i++) pixels[i] = i * 31 % 251;
        for (int i = 0; i < 768; i++) table[i / 256][i % 256] = i;
        int w = s[2], h = s[3];
        if (triptych_picture_levels(pixels, s[0], s[1], w, h, filter, w, h, 1, set, levels)) return 1;
        if (triptych_look_up(levels, 1, 3, out / 3, 2, 4, table, values)) return 2;
        free(pixels); free(levels); free(values);
      }
  puts("clean");
}
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of its own, and no memory of earlier loads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.kernel_library.cache_clear()
    yield tmp_path / "triptych" / "kernels"
    library.kernel_library.cache_clear()


def test_without_a_compiler_one_line_says_what_it_costs_and_the_remedy(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library, "INSTALLED", fresh)
    assert library.kernel_library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler; install g++" in caplog.text and "twice the CPU time" in caplog.text


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(library.BuildError, match="no room"):
        library.compile_library(fresh)
    assert list(fresh.iterdir()) == []


@pytest.mark.timeout(240)
def test_a_compiled_library_is_loaded_again_without_a_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
@pytest.mark.timeout(180)
def test_the_kernels_touch_no_memory_but_theirs(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    harness = tmp_path / "harness.cpp"
    harness.write_text(HARNESS)
    program = tmp_path / "harness"
    checks = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wno-psabi"]
    flags = [flag for flag in library.FLAGS if flag not in ("-O3", "-shared")]
    sources = map(str, library.SOURCES.glob("*.cpp"))
    subprocess.run([compiler, *flags, *checks, "-o", str(program), str(harness), *sources], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("clean\n", 0), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiler", ["g++", "no-such-compiler"])
def test_a_wheel_has_the_library_where_a_compiler_is(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
