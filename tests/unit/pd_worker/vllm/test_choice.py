"""Which engine a worker uses, by its flags, the model and what is installed."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.pd_worker.vllm.choice import EngineChoice, choose_engine

QWEN = "Qwen3VLForConditionalGeneration"
VLLM = "/venv/bin/vllm"
URL = "http://10.0.0.7:8000"


def chosen(architecture: str = QWEN, program: str = VLLM, **flags: Any) -> EngineChoice:
    return choose_engine(PDConfig(**{"device": "cuda", **flags}), architecture, program)


def test_a_decoder_only_model_on_cuda_gets_a_vllm_of_the_workers_own():
    choice = chosen()
    assert (choice.engine, choice.own) == ("vllm", True)
    assert VLLM in choice.reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cpu"}, "--device is cpu"),
        ({"architecture": "WhisperForConditionalGeneration"}, "Whisper.* is not served through vLLM"),
        ({"architecture": "SmolVLMForConditionalGeneration"}, "SmolVLM.* is not served through vLLM"),
        ({"program": ""}, "vLLM.* is not installed here: pip install vllm"),
        ({"quantization": "int8"}, "--quantization is its own"),
        ({"engine": "native"}, "--engine native"),
    ],
)
def test_everything_else_is_served_by_the_native_engine_which_says_why(given, reason):
    choice = chosen(**given)
    assert choice.engine == "native"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(choice.reason)


@pytest.mark.parametrize("engine", ["auto", "vllm"])
def test_a_server_that_is_named_is_used_whatever_is_installed(engine):
    choice = chosen(engine=engine, engine_url=URL, program="", device="cpu")
    assert (choice.engine, choice.own) == ("vllm", False)
    assert URL in choice.reason


def test_vllm_that_is_asked_for_is_started_on_any_device_or_its_absence_told():
    assert chosen(engine="vllm", device="cpu").own
    with pytest.raises(ConfigError, match="no vLLM is installed here: pip install vllm"):
        chosen(engine="vllm", program="")
