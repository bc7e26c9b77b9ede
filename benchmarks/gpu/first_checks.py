"""The first part on a GPU: versions, which kernel torch's attention chooses, and `tests/gpu`."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch.nn import functional
from torch.nn.attention import SDPBackend

from benchmarks.gpu.engine_rounds import timings
from benchmarks.gpu.kernel_launches import measure_launches
from benchmarks.gpu.part_page import PartPage
from triptych.base.machine.device import Device

_ROOT = Path(__file__).resolve().parents[2]
_VERSIONS = {"python": ">=3.11", "torch": ">=2.11,<2.14", "transformers": ">=5.23,<6", "triton": ">=3.4"}
#: New shapes of attention, as pictures of other sizes bring them.
_SHAPES = 20
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)


def run(page: PartPage, device: str, *, small: bool) -> None:
    """The whole part; `small` where no GPU is there."""
    with page.case("versions"):
        _versions(page)
    Device.of(torch.device(device)).open()
    dtype = torch.float32 if small else torch.bfloat16
    with page.case("attention"):
        _choices(page, device, dtype)
    with page.case("launches of the kernel"):
        measure_launches(page, device, dtype, small=small)
    with page.case("tests/gpu"):
        _tests(page)


def _versions(page: PartPage) -> None:
    page.table("what", "is", "should be")
    held = {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}
    held["transformers"] = metadata.version("transformers")
    # torch for a CPU comes without it.
    with contextlib.suppress(metadata.PackageNotFoundError):
        held["triton"] = metadata.version("triton")
    for name, wanted in _VERSIONS.items():
        page.row(name, held.get(name, "absent"), wanted)
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    page.row("CUDA, cuDNN", f"{torch.version.cuda}, {cudnn}", "")
    if torch.cuda.is_available():
        page.row("GPU", torch.cuda.get_device_name(0), "")
    wrong = [name for name, version in held.items() if version not in SpecifierSet(_VERSIONS[name])]
    wrong += ["triton"] if torch.cuda.is_available() and "triton" not in held else []
    if wrong:
        raise RuntimeError(f"install other versions, see tests/gpu/requirements.txt: {wrong}")


def _choices(page: PartPage, device: str, dtype: torch.dtype) -> None:
    """Which kernel each kind of call gets, and the time of new shapes, without and with cuDNN."""
    page.table("attention", "kernel of torch")
    chosen = {}
    for name, masked in (("tower, one picture", False), ("tower, padded", True)):
        query, key, value, mask = _inputs(784, device, dtype, masked=masked)
        choice = torch._fused_sdp_choice(query, key, value, mask, 0.0)
        chosen[name] = SDPBackend(choice).name
        page.row(name, chosen[name])

    def shapes(first: int) -> None:
        for number in range(_SHAPES):
            patches = first + 16 * number
            functional.scaled_dot_product_attention(*_inputs(patches, device, dtype, masked=True))

    page.row(f"{_SHAPES} new shapes of a tower", _milliseconds(lambda: shapes(1000), device))
    if device != "cpu":
        torch.backends.cuda.enable_cudnn_sdp(True)
        page.row(f"{_SHAPES} new shapes, with cuDNN", _milliseconds(lambda: shapes(2001), device))
        torch.backends.cuda.enable_cudnn_sdp(False)
        if wrong := sorted({"CUDNN_ATTENTION", "MATH"} & set(chosen.values())):
            raise RuntimeError(f"torch chose {', '.join(wrong)}")


def _inputs(patches: int, device: str, dtype: torch.dtype, *, masked: bool) -> tuple[Any, ...]:
    """Query, key, value and mask of a tower's call, whose heads have 72 elements."""
    query, key, value = torch.randn(3, 1, 16, patches, 72, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, patches, patches, device=device, dtype=dtype) if masked else None
    return query, key, value, mask


def _milliseconds(work: Callable[[], object], device: str) -> str:
    (seconds,) = timings(work, device, 1, warm_up=0)
    return f"{seconds * 1e3:.1f} ms"


def _tests(page: PartPage) -> None:
    """`tests/gpu`, counted as its outcomes come; what failed is named."""
    command = [sys.executable, "-u", "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider"]
    command += ["-o", "filterwarnings=default", "-o", "timeout=300", "--override-ini=addopts="]
    command += ["--import-mode=importlib", "--strict-markers"]
    page.table("tests/gpu", "outcome")
    counts, line = Counter[str](), ""
    with subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            if outcome := _OUTCOME.match(line):
                counts[outcome[2]] += 1
                if outcome[2] != "PASSED" or counts.total() % 20 == 0:
                    name = outcome[1] if outcome[2] != "PASSED" else f"{counts.total()} so far"
                    page.row(name, outcome[2])
            elif re.match(r"(FAILED|ERROR) ", line):
                page.row(line.strip().replace("|", "\\|")[:300], "")
    page.row("all", f"{counts['PASSED']} of {counts.total()} passed")
    #: 5: without a GPU none is collected.
    if tests.returncode not in ((0,) if torch.cuda.is_available() else (0, 5)):
        raise RuntimeError(f"pytest ended with {tests.returncode}: {line.strip()}")
