"""How the kernels are built, and their runs under sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def test_a_compiled_library_is_loaded_again_without_a_compiler(fresh, monkeypatch, tmp_path):
    if library.compiler() is None:
        pytest.skip("no C++ compiler")
    # The kernels themselves are compiled by the installation.
    one = 'extern "C" __attribute__((visibility("default"))) int one() { return 1; }'
    (tmp_path / "one.cpp").write_text(one)
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    monkeypatch.setattr(library, "INSTALLED", fresh / "none")
    compiled = library.kernel_library()
    assert compiled is not None and compiled.one() == 1
    assert [file.name for file in fresh.iterdir()] == [library.library_name()]
    library.kernel_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.kernel_library() is not None


def test_processes_that_start_together_compile_once(fresh, monkeypatch, tmp_path):
    runs, gate, waits = tmp_path / "runs", tmp_path / "gate", threading.Event()
    os.mkfifo(gate)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\necho run >> {runs}\nread go < {gate}\nwhile [ $1 != -o ]; do shift; done\n: > $2\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library.time, "sleep", lambda seconds: waits.set() or waits.wait(0.01))
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(library.compile_library, fresh) for _ in range(2)]
        second_waits = waits.wait(30)
        with open(gate, "w") as opened:
            opened.write("go\n" * 2)
        assert [future.result(60) for future in made] == [fresh / library.library_name()] * 2
    assert second_waits and runs.read_text() == "run\n"
    assert list(fresh.iterdir()) == [fresh / library.library_name()]


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


#: Tests of all that the library exports. A new kernel's tests are named here.
TESTS = (
    "tests/unit/kernels/test_copy.py",
    "tests/unit/kernels/test_cpu_linear.py",
    "tests/unit/kernels/test_heads.py",
    "tests/unit/pd_worker/attention/test_cpu_attention.py",
)
FLAGS = (
    *("-O1", "-g", "-fno-omit-frame-pointer", "-Wno-psabi", "-fno-sanitize-recover=all"),
    "-fsanitize=address,undefined,float-cast-overflow",
    "-Wl,--wrap=malloc,--wrap=aligned_alloc,--wrap=free",
)
#: Counts what the kernels have allocated. LeakSanitizer would report all that the interpreter and torch keep.
COUNTING = """
#include <atomic>
#include <stdlib.h>
static std::atomic<long> blocks;
extern "C" {
void *__real_malloc(size_t);
void *__real_aligned_alloc(size_t, size_t);
void __real_free(void *);
void *__wrap_malloc(size_t bytes) { return blocks++, __real_malloc(bytes); }
void *__wrap_aligned_alloc(size_t to, size_t bytes) { return blocks++, __real_aligned_alloc(to, bytes); }
void __wrap_free(void *block) { blocks -= block != nullptr, __real_free(block); }
__attribute__((visibility("default"))) long blocks_in_use() { return blocks; }
}
"""
#: Runs tests with the library at the first argument, then prints its blocks in use and the functions used.
PROGRAM = """
import ctypes, sys
import pytest
from triptych.kernels import library

class Kernels(ctypes.CDLL):
    used = set()

    def __getattr__(self, name):
        self.used.add(name)
        return super().__getattr__(name)

kernels = Kernels(sys.argv[1])
library._load = lambda: kernels
failed = pytest.main(["-n", "0", "-p", "no:cacheprovider", "--timeout=0", "--capture=sys", *sys.argv[2:]])
print(kernels.blocks_in_use(), *kernels.used)
sys.exit(failed)
"""


def sanitized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    counting = folder / "counting.cpp"
    counting.write_text(COUNTING)
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, *FLAGS, str(counting)))
    monkeypatch.setattr(library, "_LIMIT_SECONDS", 300.0)
    return library.compile_library(folder)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_kernels_touch_no_memory_but_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    built = sanitized(tmp_path, monkeypatch)
    # Without libstdc++ from the start, the sanitizer finds no __cxa_throw to call where torch throws.
    names = ("libasan.so", "libstdc++.so.6")
    preload = " ".join(subprocess.getoutput(f"g++ -print-file-name={name}") for name in names)
    environment = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(built), *TESTS],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[:4000] or done.stdout[-4000:]
    blocks, *used = done.stdout.splitlines()[-1].split()
    assert int(blocks) == 0, f"{blocks} blocks were not freed"
    sources = "".join(path.read_text() for path in library.SOURCES.glob("*.cpp"))
    exported = set(re.findall(r"^EXPORT .*?\b(\w+)\(", sources, re.MULTILINE))
    assert exported and exported <= set(used), f"no test in TESTS calls {exported - set(used)}"
