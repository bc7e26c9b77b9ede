"""A vLLM without a server and without our connector: what it answers, or how it ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support.vllm_engine.server import HOME, ROOT, vllm_environment

#: Of vLLM without a server; its logarithms would want a C++ compiler.
OFFLINE = MappingProxyType(
    {"PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
)


def run_alone(folder: Path, job: dict[str, Any]) -> tuple[int, str]:
    """The exit code and the log of a vLLM without a server that does `job`; see own_answers.py."""
    file, log = folder / "job.json", folder / "alone.log"
    file.write_text(json.dumps(job))
    program = ROOT / "tests" / "support" / "vllm_engine" / "own_answers.py"
    with log.open("wb") as written:
        ended = subprocess.run(
            [str(HOME / "venv" / "bin" / "python"), str(program), str(file)],
            env=vllm_environment() | OFFLINE,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            timeout=400,
        )
    return ended.returncode, log.read_text()
