"""The vLLM server that a worker is put before, once it can be used, and the choice of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yarl import URL

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject, Task
from triptych.base.vllm_classes import CLASSES, GENERIC
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import ANSWER_SECONDS, EngineInfo, VLLMClient

#: Flags of the native engine alone, and what is to be given to vLLM instead.
_NATIVE = {
    "quantization": "the weights are vLLM's",
    "attention_backend": "give vLLM's --attention-backend",
    "linear_kernel": "its products are vLLM's",
    "decode_graphs": "give vLLM's --enforce-eager or nothing",
    "preemption": "vLLM computes again",
    "max_num_batched_tokens": "give vLLM's --max-num-batched-tokens",
    "block_size": "give vLLM's --block-size",
    "share_prefixes": "give --kv-connector, or vLLM's --kv-transfer-config",
    "kv_store": "give --kv-connector, or vLLM's --kv-transfer-config",
}
#: Flags that a vLLM of the worker's own is started with; one at --engine-url has its own.
_SERVERS = {
    "device_memory": "give vLLM's --gpu-memory-utilization",
    "tensor_parallel": "give vLLM's --tensor-parallel-size",
    "kv_memory": "give vLLM's --kv-cache-memory-bytes",
    "prefix_caching": "give vLLM's --no-enable-prefix-caching",
}


def check_engine(config: PDConfig) -> None:
    """ConfigError, naming flag and remedy, for what a server at --engine-url cannot work with."""
    _check_url(config.engine_url)
    if config.dtype == "auto":
        raise ConfigError(
            "--engine vllm needs --dtype: the one that vLLM computes in, such as bfloat16, which "
            "encoders and other PD workers of the model are given, too"
        )
    if config.speculative_config:
        raise ConfigError(
            "--speculative-config is for a vLLM of the worker's own: give it to the server at --engine-url, "
            "and leave it out here"
        )
    _refuse(config, _NATIVE | _SERVERS)


def check_own(config: PDConfig) -> None:
    """ConfigError, naming flag and remedy, for what a vLLM of the worker's own is not started with."""
    _refuse(config, _NATIVE, "; flags of vLLM are for one that you start and name by --engine-url")


def _refuse(config: PDConfig, flags: Mapping[str, str], where: str = "") -> None:
    for name, remedy in flags.items():
        if _given(config, name):
            raise ConfigError(
                f"{_option(name)} is for --engine native: {remedy}, and leave {_option(name)} out here{where}"
            )


def check_native(config: PDConfig) -> None:
    """ConfigError, naming flag and remedy, for what the native engine has otherwise."""
    if config.lora_modules:
        raise ConfigError(
            "--lora-modules is for --engine vllm: the native engine applies no adapters; give --engine vllm, "
            "or merge the adapter into a checkpoint of its own (PEFT's merge_and_unload) and serve that"
        )
    if config.speculative_config:
        raise ConfigError(
            "--speculative-config is for --engine vllm: the native engine computes a token a step; give "
            "--engine vllm, or leave --speculative-config out"
        )
    if config.kv_connector != "none":
        raise ConfigError(
            f"--kv-connector {config.kv_connector} is for --engine vllm: the native engine's KV goes through "
            "the store; leave --kv-connector out"
        )
    if config.engine_class != "known":
        raise ConfigError(
            f"--engine-class {config.engine_class} is for --engine vllm: the native one serves all of "
            "docs/models.md; leave --engine-class out"
        )


def native_flag(config: PDConfig) -> str:
    """A flag that is given and that only the native engine has; "" where there is none."""
    return next((_option(name) for name in _NATIVE if _given(config, name)), "")


def _given(config: PDConfig, name: str) -> bool:
    return bool(getattr(config, name) != getattr(PDConfig(), name))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_url(text: str) -> None:
    try:
        url = URL(text)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"--engine-url {text[:200]!r} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or not port:
        raise ConfigError(f"--engine-url {text[:200]!r}: give http://host:port or https://host:port")
    if url.user or url.password:
        raise ConfigError("--engine-url holds credentials: give vLLM's key by --engine-key-file")
    if url.query or url.fragment:
        raise ConfigError(f"--engine-url {text[:200]!r}: leave out what comes after the path")


def read_key(file: str) -> str:
    """The key in --engine-key-file; "" without a file."""
    if not file:
        return ""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--engine-key-file {file} cannot be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--engine-key-file {file} holds no key of printable characters")
    return key


@dataclass(frozen=True, slots=True)
class EngineConnection:
    """A server, and whether it lives."""

    client: VLLMClient
    health: EngineHealth
    info: EngineInfo

    def metrics_reader(self) -> Callable[[], bytes]:
        """What other threads read the server's metrics by; the running event loop asks for them."""
        loop, patience = asyncio.get_running_loop(), 2 * ANSWER_SECONDS
        return lambda: asyncio.run_coroutine_threadsafe(self.client.metrics(), loop).result(patience)


@asynccontextmanager
async def connected(
    config: PDConfig, stop: asyncio.Event, probe: JsonObject | None = None
) -> AsyncIterator[EngineConnection | None]:
    """The server of `config`, which pools if there is a `probe`; ConfigError where it never can be used.

    None where `stop` is set before it can be used.
    """
    client = VLLMClient(config.engine_url, read_key(config.engine_key_file), probe)
    try:
        health = EngineHealth(client, config.stall_timeout)
        info = await _unless_stopped(health.first_answer(), stop)
        yield None if info is None else EngineConnection(client, health, info)
    finally:
        await client.close()


async def _unless_stopped(answer: Coroutine[Any, Any, EngineInfo], stop: asyncio.Event) -> EngineInfo | None:
    """What the engine says once it can be used; None where this process is to end before."""
    stopped = asyncio.create_task(stop.wait())
    answering = asyncio.create_task(answer)
    await asyncio.wait((stopped, answering), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if answering.done():
        return answering.result()
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answering
    return None


INSTALL = "pip install vllm, or `make images IMAGES=worker-vllm`, or give --engine-url"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """`engine` is native or vllm; `own`: this worker starts that vLLM. `reason` is one for people."""

    engine: str
    reason: str
    own: bool = False


def choose_engine(config: PDConfig, architecture: str, program: str, task: Task = "generate") -> EngineChoice:
    """The engine for a checkpoint of this architecture, where `program` is vLLM's command or "".

    With --engine auto that is vLLM for decoder-only models on CUDA whose rows are known to equal those of its
    own encoder, where it can be had. ConfigError for --engine vllm without a server or program.
    """
    if config.engine == "native":
        return EngineChoice("native", "--engine native")
    if task == "token_embed" and (config.engine_url or config.engine == "vllm"):
        raise ConfigError(
            f"--engine vllm: a vector for each token of {architecture} is the native engine's: "
            "leave out --engine and --engine-url"
        )
    if config.engine_url:
        return EngineChoice("vllm", f"the server at --engine-url {config.engine_url}")
    if config.engine == "vllm":
        if not program:
            raise ConfigError(f"--engine vllm: no vLLM is installed here: {INSTALL}")
        return EngineChoice("vllm", f"--engine vllm, by {program}", own=True)
    if not config.device.startswith("cuda"):
        return EngineChoice("native", f"--device is {config.device}")
    tried = config.engine_class == "generic"
    known = CLASSES.get(architecture, GENERIC if tried else None)
    if known is None:
        return EngineChoice("native", f"{architecture} is not served through vLLM")
    if known.not_run and not tried:
        return EngineChoice("native", f"{architecture} was not run through vLLM, since {known.not_run}")
    if task != "generate" and not known.pooled:
        return EngineChoice("native", f"pictures of {architecture} are not known to be pooled by vLLM")
    if flag := native_flag(config):
        return EngineChoice("native", f"{flag} is its own")
    if not program:
        return EngineChoice("native", f"vLLM, which is faster on a GPU, is not installed here: {INSTALL}")
    return EngineChoice("vllm", f"a decoder-only model on {config.device}, by {program}", own=True)


def vllm_program() -> str:
    """The command `vllm` of this environment, else of the search path; "" where there is none."""
    own = Path(sys.executable).parent / "vllm"
    return str(own) if own.is_file() else shutil.which("vllm") or ""
