"""What a checkpoint says where the request is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from support.data.checkpoints import FAMILIES, build_checkpoint
from support.fakes.fake_cuda import fake_cuda
from triptych.base.errors import ConfigError
from triptych.models.base import GenerationDefaults
from triptych.models.registry import generation_defaults, resolve_device, resolve_dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_do_sample_is_greedy(family: str) -> None:
    path = build_checkpoint(family)
    eos = AutoTokenizer.from_pretrained(path).eos_token_id
    found = generation_defaults(path)
    assert (found.eos_token_ids, found.temperature, found.top_p, found.top_k) == ((eos,), 0.0, 1.0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_values_and_a_list_of_eos_are_read(family: str) -> None:
    path = build_checkpoint(family, variant="list_eos+sampling")
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = generation_defaults(path)
    assert found.eos_token_ids == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.8, 20)


def test_without_generation_config_the_models_eos_counts(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    expected = generation_defaults(path).eos_token_ids
    (path / "generation_config.json").unlink()
    found = generation_defaults(path)
    assert found.eos_token_ids == expected
    assert found == GenerationDefaults(eos_token_ids=expected)


@pytest.mark.parametrize(("sampled", "min_p"), [(True, 0.2), (False, 0.0)])
def test_a_repetition_penalty_counts_without_sampling_and_min_p_does_not(tmp_path, sampled, min_p):
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    values = {"eos_token_id": 3, "do_sample": sampled, "min_p": 0.2, "repetition_penalty": 1.05}
    (path / "generation_config.json").write_text(json.dumps(values))
    found = generation_defaults(path)
    assert (found.repetition_penalty, found.min_p) == (1.05, min_p)


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda:1", "auto", torch.bfloat16),
        ("cuda", "float16", torch.float16),
    ],
)
@pytest.mark.parametrize("where", ["dtype", "torch_dtype", "text_config"])
def test_auto_is_the_checkpoints_dtype_on_cuda_and_float32_on_a_cpu(tmp_path, where, device, name, expected):
    config = {"text_config": {"dtype": "bfloat16"}} if where == "text_config" else {where: "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_dtype(tmp_path, torch.device(device), name) == expected


@pytest.mark.parametrize(
    "values",
    [{"eos_token_id": "x"}, {"eos_token_id": [3, "x"]}, {"max_new_tokens": "many"}, {"top_p": {}}],
)
def test_a_generation_config_of_another_kind_is_named(tmp_path: Path, values: dict[str, object]) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, **values}))
    with pytest.raises(ConfigError, match=r"MODEL=.*generation_config\.json"):
        generation_defaults(path)


@pytest.mark.parametrize("name", ["xpu", "mps", "meta", "hpu:1", "nonsense"])
def test_a_device_that_torch_knows_and_the_workers_do_not_is_one_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {name} is .*: use cpu, cuda or cuda:N"):
        resolve_device(name)


def test_cudnns_attention_is_off_before_anything_runs_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert cuda.calls == [("enable_cudnn_sdp", False), ("set_device", "cuda:1")]


def test_cuda_without_a_number_is_the_first_gpu_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    assert resolve_device("cuda") == torch.device("cuda", 0)
