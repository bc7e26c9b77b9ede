"""The flags of --engine vllm, checked."""

from __future__ import annotations

from pathlib import Path

from yarl import URL

from triptych.config import PDConfig
from triptych.errors import ConfigError
from triptych.pd_worker.vllm.in_process.arguments import parse_engine_args

#: Flags of the native engine, and what is to be given to vLLM instead.
_NATIVE = {
    "quantization": "the weights are vLLM's",
    "device_memory": 'give {"gpu_memory_utilization": 0.9}',
    "attention_backend": 'give {"attention_backend": "..."}',
    "decode_graphs": 'give {"enforce_eager": true} or nothing',
    "preemption": "vLLM computes again",
    "device": "vLLM's build is for one kind, and CUDA_VISIBLE_DEVICES chooses",
    "threads": "set VLLM_CPU_OMP_THREADS_BIND",
}
#: Those that a worker in front of a server may be given, as all others.
_HARMLESS = ("device", "threads")
#: Those that have a meaning for vLLM in this process, and the option of a server's instead.
_IN_PROCESS = {
    "tensor_parallel": "--tensor-parallel-size",
    "kv_memory": "--kv-cache-memory-bytes",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "prefix_caching": "--no-enable-prefix-caching",
    "engine_args": "options",
}


def check_engine(config: PDConfig) -> None:
    """ConfigError, naming flag and remedy, for what --engine vllm cannot work with."""
    if config.engine_url:
        _check_url(config.engine_url)
    elif config.engine_key_file:
        raise ConfigError("--engine-key-file is for --engine-url: give both, or neither")
    if config.dtype == "auto":
        raise ConfigError(
            "--engine vllm needs --dtype: the one that vLLM computes in, such as bfloat16, which "
            "encoders and other PD workers of the model are given, too"
        )
    for name, remedy in _NATIVE.items():
        if _given(config, name) and not (config.engine_url and name in _HARMLESS):
            where = "" if config.engine_url else " by --engine-args" * remedy.startswith("give")
            raise ConfigError(
                f"{_option(name)} is for --engine native: {remedy}{where}, and leave {_option(name)} out here"
            )
    for name, option in _IN_PROCESS.items():
        if config.engine_url and _given(config, name):
            raise ConfigError(
                f"{_option(name)} has no effect on a server: give vLLM's {option}, and leave "
                f"{_option(name)} out here"
            )
    parse_engine_args(config.engine_args)


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
