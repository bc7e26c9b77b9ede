"""vLLM's engine arguments as our flags and --engine-args say them. Pure: vLLM is not imported."""

from __future__ import annotations

import json

from triptych.config import PDConfig
from triptych.errors import ConfigError
from triptych.types import JsonObject

#: Arguments that this worker sets itself, and the flag that decides them.
_OWN = {
    "model": "MODEL",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "kv_cache_memory_bytes": "--kv-memory",
    "tensor_parallel_size": "--tensor-parallel",
    "enable_prefix_caching": "--no-prefix-caching",
    "served_model_name": "--served-model-name",
}
#: Arguments that requests of this worker depend on.
_NEEDED = (
    *("ec_transfer_config", "enable_mm_embeds", "mm_processor_cache_type", "skip_tokenizer_init"),
    *("runner", "convert", "disable_log_stats", "aggregate_engine_logging", "shutdown_timeout"),
    *("logprobs_mode", "generation_config", "override_generation_config", "enable_log_requests"),
    *("max_num_queued_reqs", "max_num_queued_tokens", "stream_interval", "data_parallel_rank"),
    *("tokenizer", "tokenizer_mode", "tokenizer_revision", "revision", "code_revision", "hf_token"),
)
#: Arguments that would run code of a checkpoint or of a file.
_CODE = (
    *("trust_remote_code", "scheduler_cls", "worker_cls", "worker_extension_cls", "logits_processors"),
    *("reasoning_parser_plugin", "io_processor_plugin"),
)
_EXAMPLE = "--engine-args '{\"gpu_memory_utilization\": 0.85}'"
#: Seconds that vLLM waits for an embedding, which this worker has seen in the store before.
_WAIT_SECONDS = 2
_LEAST_HOST_BYTES = 1 << 20


def parse_engine_args(text: str) -> JsonObject:
    """The arguments in --engine-args. ConfigError for those that are not the user's to give."""
    if not text:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--engine-args is no JSON ({error}): give an object, like {_EXAMPLE}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"--engine-args must be a JSON object, like {_EXAMPLE}")
    for name in given:
        _check_name(name)
    limits = given.get("limit_mm_per_prompt")
    if given.get("language_model_only") or (isinstance(limits, dict) and limits.get("image") == 0):
        # vLLM then leaves out deepstack with the tower, and its engine ends at the first image.
        raise ConfigError("--engine-args: vLLM cannot take images without its tower: allow an image or more")
    return given


def _check_name(name: str) -> None:
    if name.startswith("-") or "-" in name:
        written = name.lstrip("-").replace("-", "_")
        raise ConfigError(f"--engine-args: write {written!r}, as vLLM's Python API has it, not {name!r}")
    if name in _OWN:
        raise ConfigError(f"--engine-args cannot give {name!r}: use {_OWN[name]}")
    if name in _NEEDED:
        raise ConfigError(f"--engine-args cannot give {name!r}: this worker depends on it, leave it out")
    if name in _CODE or name.startswith("_"):
        raise ConfigError(f"--engine-args cannot give {name!r}: no foreign code is run, leave it out")


def engine_arguments(config: PDConfig, namespace: str) -> JsonObject:
    """Arguments of vLLM's AsyncEngineArgs.

    A flag at our default leaves vLLM its own default: ours are the native engine's.
    """
    native = PDConfig()
    arguments: JsonObject = {
        # What a user may replace.
        # The tower never runs.
        "limit_mm_per_prompt": {"video": 0},
        "skip_mm_profiling": True,
        # Else there is no bound on blanks in JSON.
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
        **parse_engine_args(config.engine_args),
        "model": config.model,
        "served_model_name": config.served_model_name or None,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_prefix_caching": config.prefix_caching,
        "enable_mm_embeds": True,
        "ec_transfer_config": _transfer(config, namespace),
        # The steps are counted by a logger of ours.
        "disable_log_stats": True,
    }
    if config.max_model_len:
        arguments["max_model_len"] = config.max_model_len
    if config.kv_memory:
        arguments["kv_cache_memory_bytes"] = config.kv_memory
    for name in ("max_num_batched_tokens", "block_size"):
        if (value := getattr(config, name)) != getattr(native, name):
            arguments[name] = value
    return arguments


def _transfer(config: PDConfig, namespace: str) -> JsonObject:
    return {
        "ec_connector": "TriptychECConnector",
        "ec_connector_module_path": "triptych.integrations.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {
            "store": config.store,
            "namespace": namespace,
            "wait_seconds": _WAIT_SECONDS,
            "host_memory_bytes": max(_LEAST_HOST_BYTES, config.embedding_memory),
            "ends_with_parent": True,
        },
    }
