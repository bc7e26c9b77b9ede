"""vLLM's arguments come from our flags; --engine-args adds to them and replaces none of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from triptych.config import PDConfig
from triptych.errors import ConfigError
from triptych.integrations.vllm.options import parse_options
from triptych.pd_worker.vllm.in_process.arguments import engine_arguments, parse_engine_args

NAMESPACE = "ab" * 32
CONFIG = PDConfig(model="/models/qwen", engine="vllm", dtype="bfloat16", store="redis://store:6379/0")


def made(**flags: Any) -> dict[str, Any]:
    return engine_arguments(replace(CONFIG, **flags), NAMESPACE)


@pytest.mark.parametrize(
    ("flags", "argument", "value"),
    [
        ({}, "model", "/models/qwen"),
        ({}, "dtype", "bfloat16"),
        ({"max_num_seqs": 7}, "max_num_seqs", 7),
        ({"max_model_len": 4096}, "max_model_len", 4096),
        ({"kv_memory": 1 << 30}, "kv_cache_memory_bytes", 1 << 30),
        ({"tensor_parallel": 2}, "tensor_parallel_size", 2),
        ({"max_num_batched_tokens": 8192}, "max_num_batched_tokens", 8192),
        ({"block_size": 32}, "block_size", 32),
        ({"prefix_caching": False}, "enable_prefix_caching", False),
        ({"served_model_name": "qwen"}, "served_model_name", "qwen"),
        ({}, "enable_mm_embeds", True),
    ],
)
def test_a_flag_is_vllms_argument(flags, argument, value):
    assert made(**flags)[argument] == value


@pytest.mark.parametrize(
    "argument", ["max_model_len", "kv_cache_memory_bytes", "max_num_batched_tokens", "block_size"]
)
def test_what_is_not_given_is_left_to_vllm(argument):
    assert argument not in made()


def test_the_connector_gets_store_namespace_and_memory_and_takes_these_options():
    transfer = made(encoder_cache_memory=1 << 28)["ec_transfer_config"]
    options = parse_options(transfer["ec_connector_extra_config"])
    assert transfer["ec_role"] == "ec_consumer"
    assert (options.store, options.namespaces) == ("redis://store:6379/0", (NAMESPACE,))
    assert options.host_memory_bytes == 1 << 28 and options.ends_with_parent


def test_more_arguments_are_handed_through_and_replace_our_defaults():
    given = {"gpu_memory_utilization": 0.8, "limit_mm_per_prompt": {"image": 4}}
    arguments = made(engine_args=json.dumps(given))
    assert {name: arguments[name] for name in given} == given
    assert made()["limit_mm_per_prompt"] == {"video": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"max_num_seqs": 4}', "use --max-num-seqs"),
        ('{"dtype": "float16"}', "use --dtype"),
        ('{"kv_cache_memory_bytes": 4}', "use --kv-memory"),
        ('{"ec_transfer_config": {}}', "depends on it"),
        ('{"tokenizer": "other"}', "depends on it"),
        ('{"limit_mm_per_prompt": {"image": 0}}', "allow an image or more"),
        ('{"language_model_only": true}', "allow an image or more"),
        ('{"trust_remote_code": true}', "no foreign code"),
        ('{"_api_process_count": 2}', "no foreign code"),
        ('{"--enforce-eager": true}', "write 'enforce_eager'"),
        ('{"enforce-eager": true}', "write 'enforce_eager'"),
    ],
)
def test_what_is_not_the_users_to_give_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match="--engine-args") as error:
        parse_engine_args(text)
    assert message in str(error.value)
