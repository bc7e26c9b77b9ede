"""The kernels' own tests, run with address and undefined-behaviour sanitizers in the library.

The tests load the library as all callers do. Buffers of numpy and torch end where their arrays end, so that a
byte read or written beside them is seen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.kernels import library

ROOT = Path(__file__).parents[3]
#: Tests of all that the library exports. A new kernel's tests are named here.
TESTS = (
    "tests/unit/kernels/test_copy.py",
    "tests/unit/kernels/test_cpu_heads.py",
    "tests/unit/kernels/test_cpu_linear.py",
    "tests/unit/pd_worker/attention/test_cpu_attention.py",
)
FLAGS = (
    *("-O1", "-g", "-fno-omit-frame-pointer", "-Wno-psabi", "-fno-sanitize-recover=all"),
    *("-fsanitize=address,undefined,float-cast-overflow", "-Wl,--wrap=malloc,--wrap=free"),
)
#: Counts what the kernels have allocated. LeakSanitizer would report all that the interpreter and torch keep.
COUNTING = """
#include <atomic>
#include <stdlib.h>
static std::atomic<long> blocks;
extern "C" {
void *__real_malloc(size_t);
void __real_free(void *);
void *__wrap_malloc(size_t bytes) { return blocks++, __real_malloc(bytes); }
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
