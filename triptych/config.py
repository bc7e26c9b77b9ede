"""Every flag of every service: one frozen dataclass per service, built once and passed down.

A field made by `flag` is a command-line option (`--max-model-len`), an environment variable
(`TRIPTYCH_MAX_MODEL_LEN`) and a documented default at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from triptych.errors import ConfigError

T = TypeVar("T")

MIB = 1 << 20
GIB = 1 << 30
#: For embeddings, in a PD worker whose memory is not measured.
EMBEDDING_MEMORY = 256 * MIB
#: Of --kv-memory, beside it and on a CPU only: for a view of the decoding sequences. What does not fit in it
#: is gathered from the blocks in every step.
VIEW_SHARE = 0.25
#: Shortest internal token.
MIN_TOKEN_CHARS = 16
#: Of the memory that is free before workers start, what they may use: of a GPU, and of a machine or cgroup.
CUDA_SHARE = 0.9
CPU_SHARE = 0.5
#: What a process holds of a GPU beside its tensors: the context, kernels and the workspaces of libraries.
CUDA_CONTEXT_BYTES = 600 * MIB
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2g" or "1048576"; units are powers of 1024. ConfigError otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no size: write it like 512MiB or 2GiB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def format_size(nbytes: int) -> str:
    """Bytes for people: "512.0 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def flag(
    default: T,
    help: str,
    *,
    size: bool = False,
    choices: tuple[str, ...] = (),
    secret: bool = False,
    many: bool = False,
    auto: bool = False,
) -> T:
    """A field that is a flag. `size` fields take "512MiB" and hold bytes; with `auto` 0 is written "auto".

    `secret` values reach our own processes by an inherited file, never by their command line, and no text
    of the config shows them; those of `many` may be given several times, and are joined by commas.
    """
    metadata = {"help": help, "size": size, "choices": choices, "secret": secret, "many": many, "auto": auto}
    return field(default=default, metadata=metadata, repr=not secret)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """What every service needs."""

    store: str = flag(
        "",
        "store address: unix:///path/to/socket or redis://host:port/0; one with a password rather by the "
        "variable than by the flag",
        secret=True,
    )
    store_password_file: str = flag("", "file that holds the store's password, in place of one in --store")
    internal_token: str = flag(
        "", "shared secret of the cluster's gRPC; needed for non-loopback binds", secret=True
    )
    internal_token_file: str = flag("", "file that holds the internal token, in place of the flag")
    stall_timeout: float = flag(
        60.0,
        "seconds that an engine may stand still in one layer of a step; then its worker's process ends, and "
        "proxies send its requests elsewhere; 0: for ever",
    )
    log_level: str = flag("info", "least level to log", choices=("debug", "info", "warning", "error"))
    metrics_port: int = flag(0, "port of /metrics and /health of this process; 0 picks a free one")


@dataclass(frozen=True, slots=True)
class WorkerConfig(ServiceConfig):
    """What both kinds of worker need. `model` is a checkpoint folder."""

    model: str = ""
    served_model_name: str = flag("", "model name that clients use; the folder's name by default")
    model_revision: str = flag("", "names the weights in cache keys; their digest by default")
    host: str = flag("127.0.0.1", "address to bind the worker's gRPC server to")
    port: int = flag(0, "port of the worker's gRPC server; 0 picks a free one")
    advertise: str = flag("", "address that others reach this worker at, host:port; the bound one by default")
    device: str = flag("cpu", "torch device: cpu, cuda or cuda:N")
    device_memory: int = flag(
        0,
        "all memory that a worker may use of its device; auto: of what is free at the start 0.9 of a GPU's, "
        "half of the machine's or cgroup's",
        size=True,
        auto=True,
    )
    dtype: str = flag(
        "auto",
        "dtype of weights and embeddings; auto: the checkpoint's on CUDA, float32 for 16-bit float "
        "checkpoints on CPU unless bfloat16 is asked for",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    tensor_parallel: int = flag(1, "workers that share one model's weights; only 1 is served")
    pipeline_parallel: int = flag(1, "workers that share one model's layers; only 1 is served")
    speculative_model: str = flag("", "a model that guesses ahead; not served")
    kv_cache_dtype: str = flag(
        "auto", "dtype of keys and values; auto: that of --dtype; fp8 is not served", choices=("auto", "fp8")
    )
    quantization: str = flag(
        "none",
        "linear layers in 8 bits, made when weights are loaded: int8 on both sides, int8-decoder on PD "
        "workers only; all workers of a model are given the same",
        choices=("none", "int8", "int8-decoder"),
    )
    threads: int = flag(0, "torch threads; 0 chooses")
    cpus: str = flag("", "cores to run on, like 0,1 or 2-3; all by default")
    core_page: str = flag("", "file in which the workers of one machine see whose threads compute")
    core_slot: int = flag(0, "this worker's place in --core-page")


@dataclass(frozen=True, slots=True)
class EncoderConfig(WorkerConfig):
    max_image_pixels: int = flag(40_000_000, "largest picture, width times height, before any resize")
    max_audio_seconds: float = flag(1800.0, "longest audio file; a second takes 0.5 MiB while it is prepared")
    encoder_batch_patches: int = flag(
        0, "patches in one encoder batch, over all its items; 0: 512 on a CPU, else 16384"
    )
    plan_credit: int = flag(16, "jobs that may be in preprocessing or waiting for it")
    tower_credit: int = flag(8, "jobs that may wait for the tower or run in it")
    prepared_memory: int = flag(512 * MIB, "host memory for preprocessed media", size=True)
    encoder_media_memory: int = flag(
        256 * MIB, "host memory for media that wait for preprocessing; a larger item has it alone", size=True
    )
    decode_threads: int = flag(2, "threads that decode media")
    embedding_ttl: float = flag(3600.0, "seconds that an unused embedding stays in the store")

    @property
    def batch_patches(self) -> int:
        """--encoder-batch-patches, or what suits the device.

        A CPU is busy with one picture: in a larger batch all of them are done when the last one is.
        """
        return self.encoder_batch_patches or (512 if self.device == "cpu" else 16384)


@dataclass(frozen=True, slots=True)
class PDConfig(WorkerConfig):
    max_model_len: int = flag(
        0, "longest prompt plus output, tokens; 0: the checkpoint's, at most 32768 and what --kv-memory holds"
    )
    max_num_seqs: int = flag(64, "requests that run at once")
    max_num_batched_tokens: int = flag(512, "token budget of one engine step")
    block_size: int = flag(16, "tokens of one KV block")
    kv_memory: int = flag(
        0,
        "memory for the KV cache, on a CPU a quarter more; auto: what --device-memory leaves, as measured at "
        "the start, and no more than --max-num-seqs requests can use",
        size=True,
        auto=True,
    )
    encoder_cache_memory: int = flag(
        0,
        "memory for embeddings in a PD worker, and as much again for copies in host memory; auto: an eighth "
        "of what --device-memory leaves, and no more than --max-num-seqs requests can use; 256MiB where "
        "nothing is measured, as with --kv-memory on a CPU",
        size=True,
        auto=True,
    )
    prefix_caching: bool = flag(True, "reuse KV blocks of equal prefixes")
    step_interval: float = flag(
        0.02, "seconds between the beginnings of two steps, at least, while workers on --core-page lack cores"
    )
    keep_core: bool = flag(
        False, "a worker of one thread on --core-page keeps to a core of its own while no other computes"
    )
    preemption: str = flag(
        "recompute",
        "what becomes of a request whose KV blocks are needed: computed again, or swapped out to host memory",
        choices=("recompute", "swap"),
    )
    swap_memory: int = flag(256 * MIB, "host memory for swapped KV blocks, with --preemption swap", size=True)
    attention_backend: str = flag(
        "sdpa",
        "sdpa, torch's attention kernel; blockwise, blocks of keys one by one, which keeps no mask or bias "
        "as a whole; flex, FlexAttention, slow on a CPU, compiled on CUDA, where it has never been run yet",
        choices=("sdpa", "blockwise", "flex"),
    )

    @property
    def embedding_memory(self) -> int:
        """Bytes for embeddings, as given or as found at the start."""
        return self.encoder_cache_memory or EMBEDDING_MEMORY


#: How encoders and PD workers share cores, by flag; a replica's sides take turns.
SHARING_FLAGS = ("core_page", "core_slot", "step_interval", "keep_core")


@dataclass(frozen=True, slots=True)
class ColocatedConfig:
    """Both sides of one replica; what they have in common is equal in both."""

    encoder: EncoderConfig
    pd: PDConfig
    connector: str = flag(
        "redis",
        "where embeddings go from tower to decoder: redis, the store that replicas share; memory, this "
        "process, where it is the only one",
        choices=("redis", "memory"),
    )
    store_memory: int = flag(
        512 * MIB, "memory for embeddings in this process by --connector memory", size=True
    )


@dataclass(frozen=True, slots=True)
class ProxyConfig(ServiceConfig):
    host: str = flag("127.0.0.1", "address to bind HTTP and gRPC to")
    port: int = flag(8000, "HTTP port")
    grpc_port: int = flag(8001, "gRPC port")
    cpus: str = flag("", "cores to run on, like 0,1 or 2-3; all by default")
    max_images: int = flag(16, "images in one request")
    max_choices: int = flag(16, "answers (n) to one request")
    max_body: int = flag(64 * MIB, "largest request body", size=True)
    body_memory: int = flag(GIB, "memory for the bodies of requests in flight", size=True)
    media_urls: bool = flag(True, "fetch pictures from http(s) URLs")
    media_timeout: float = flag(30.0, "seconds to fetch one picture, with redirects and retries")
    media_fetches: int = flag(64, "pictures fetched at once")
    max_media_bytes: int = flag(64 * MIB, "largest picture or audio file, at most 64MiB", size=True)
    media_memory: int = flag(GIB, "memory for the media of requests in flight", size=True)
    media_disk: int = flag(4 * GIB, "disk for those above 1MiB", size=True)
    spool_folder: str = flag("", "where those go; the system's temporary folder by default")
    allow_media_hosts: str = flag("", "hosts, by comma, that pictures may come from at any address and port")
    allow_media_networks: str = flag(
        "", "networks, by comma, that pictures may come from though they are not public"
    )
    allowed_media_folder: str = flag("", "folder that file: URLs may name; none by default")
    max_queue: int = flag(256, "requests in flight before new ones get 429")
    flow_control: bool = flag(
        True, "encode only what a PD worker has room for; --no-flow-control is for measurements of just that"
    )
    request_timeout: float = flag(300.0, "seconds that a request may take")
    store_memory: int = flag(0, "the store's byte budget; 0: as the store says", size=True)
    api_key: str = flag("", "key that clients must send; several with commas", secret=True, many=True)
    api_key_file: str = flag("", "file of hashed keys with names and limits; re-read when it changes")
    auth: bool = flag(True, "a non-loopback --host needs API keys; --no-auth where a gateway asks for them")
    key_requests_per_minute: int = flag(0, "requests of one key in a minute; 0: no limit")
    key_tokens_per_minute: int = flag(0, "prompt and output tokens of one key in a minute; 0: no limit")
    key_concurrent_requests: int = flag(0, "requests of one key at once; 0: no limit")
    metrics_port: int = flag(
        0, "port of its own for the proxy's /metrics; 0: on the HTTP port, by key where keys are in use"
    )
    metrics_host: str = flag("", "address to bind --metrics-port to; --host's by default")


def flags_of(config: type[Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """(field name, default, metadata) of every flag of a config class, in order."""
    return [(f.name, f.default, dict(f.metadata)) for f in fields(config) if "help" in f.metadata]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to `host`."""
    return host in ("127.0.0.1", "::1", "localhost")


def check_front_door(host: str, *, api_key: str, api_key_file: str, auth: bool) -> None:
    """ConfigError when everybody could use the cluster and nobody has said that they may."""
    if not auth and (api_key or api_key_file):
        raise ConfigError("--no-auth and API keys contradict each other: leave one of them out")
    if auth and not is_loopback(host) and not api_key and not api_key_file:
        raise ConfigError(
            f"--host {host} is reachable from other machines: give --api-key-file or --api-key "
            "(`triptych key NAME` makes one), say --no-auth where a gateway asks for keys, or bind 127.0.0.1"
        )


def read_internal_token(token: str, path: str) -> str:
    """The cluster's token, from the flag or from the file. ConfigError when it cannot be told."""
    if not path:
        return _long_enough(token, "--internal-token")
    if token:
        raise ConfigError("--internal-token and --internal-token-file are both set: leave one of them out")
    try:
        content = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--internal-token-file {path} cannot be read") from None
    if not content or not content.isascii() or not content.isprintable():
        raise ConfigError(f"--internal-token-file {path} must hold one line of printable ASCII characters")
    return _long_enough(content, f"--internal-token-file {path}")


def _long_enough(token: str, flag: str) -> str:
    """The token, or none. Proofs in the registry are made with it: a short one could be guessed from them."""
    if token and len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{flag} has fewer than {MIN_TOKEN_CHARS} characters: `openssl rand -hex 32` makes one"
        )
    return token


def check_bind(host: str, internal_token: str) -> None:
    """ConfigError when a worker's gRPC server would be reachable from outside without a token."""
    if not is_loopback(host) and not internal_token:
        raise ConfigError(
            f"--host {host} is reachable from other machines: set --internal-token, or bind 127.0.0.1"
        )


def check_advertise(advertise: str) -> None:
    """ConfigError when nobody could reach the advertised address."""
    if advertise.rsplit(":", 1)[0] in ("0.0.0.0", "[::]", "::", ""):
        raise ConfigError(
            f"--advertise {advertise!r} is no address that others can reach: "
            "name this host, like 10.0.0.7:50051"
        )
