"""Which engine a PD worker uses, and why."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.vllm_classes import CLASSES
from triptych.pd_worker.vllm.connection import native_flag

INSTALL = "pip install vllm, or `make images IMAGES=worker-vllm`, or give --engine-url"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """`engine` is native or vllm; `own`: this worker starts that vLLM. `reason` is one for people."""

    engine: str
    reason: str
    own: bool = False


def choose_engine(config: PDConfig, architecture: str, program: str) -> EngineChoice:
    """The engine for a checkpoint of this architecture, where `program` is vLLM's command or "".

    With --engine auto that is vLLM for decoder-only models on CUDA whose rows are known to equal those of its
    own encoder, where it can be had. ConfigError for --engine vllm without a server or program.
    """
    if config.engine == "native":
        return EngineChoice("native", "--engine native")
    if config.engine_url:
        return EngineChoice("vllm", f"the server at --engine-url {config.engine_url}")
    if config.engine == "vllm":
        if not program:
            raise ConfigError(f"--engine vllm: no vLLM is installed here: {INSTALL}")
        return EngineChoice("vllm", f"--engine vllm, by {program}", own=True)
    if not config.device.startswith("cuda"):
        return EngineChoice("native", f"--device is {config.device}")
    known = CLASSES.get(architecture)
    if known is None or not known.one_run:
        return EngineChoice("native", f"{architecture} is not served through vLLM")
    if flag := native_flag(config):
        return EngineChoice("native", f"{flag} is its own")
    if not program:
        return EngineChoice("native", f"vLLM, which is faster on a GPU, is not installed here: {INSTALL}")
    return EngineChoice("vllm", f"a decoder-only model on {config.device}, by {program}", own=True)


def vllm_program() -> str:
    """The command `vllm` of this environment, else of the search path; "" where there is none."""
    own = Path(sys.executable).parent / "vllm"
    return str(own) if own.is_file() else shutil.which("vllm") or ""
