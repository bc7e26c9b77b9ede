"""The flags of --engine vllm, which engine a model gets, and places that are given in order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.types import Task
from triptych.pd_worker.vllm.attempt import Diverged, Replay
from triptych.pd_worker.vllm.connection import EngineChoice, check_engine, choose_engine, read_key
from triptych.pd_worker.vllm.run import MAX_FAILURES, BatchPlaces, EmbeddingRoom, Retries

GOOD = PDConfig(engine="vllm", engine_url="http://10.0.0.7:8000", dtype="bfloat16")


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "https://vllm.svc:443/prefix", "http://[::1]:8000/"])
def test_an_address_with_host_and_port_is_taken(url):
    check_engine(replace(GOOD, engine_url=url))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device_memory": 2}, "--gpu-memory-utilization"),
        ({"kv_memory": 1 << 20}, "--kv-cache-memory-bytes"),
        ({"engine_url": "10.0.0.7:8000"}, "give http://host:port"),
        ({"engine_url": "unix:///run/vllm"}, "give http://host:port"),
        ({"engine_url": "http://host:99999999"}, "--engine-url"),
        ({"engine_url": "http://me:secret@host:8000"}, "--engine-key-file"),
        ({"engine_url": "http://host:8000/?a=b"}, "leave out what comes after the path"),
        ({"dtype": "auto"}, "needs --dtype"),
        ({"tensor_parallel": 2}, "--tensor-parallel-size"),
        ({"quantization": "int8"}, "--quantization is for --engine native"),
    ],
)
def test_a_mistake_names_the_flag_and_the_remedy(given, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_engine(replace(GOOD, **given))
    assert "secret" not in str(error.value)


def test_the_key_is_the_files_without_its_line_end(tmp_path):
    file = tmp_path / "key"
    file.write_text("sesame\n")
    assert read_key(str(file)) == "sesame" and read_key("") == ""


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "schlüssel"])
def test_a_file_without_a_usable_key_is_refused(tmp_path, text):
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no key"):
        read_key(str(file))


QWEN = "Qwen3VLForConditionalGeneration"
VLLM = "/venv/bin/vllm"
URL = "http://10.0.0.7:8000"


def chosen(
    architecture: str = QWEN, program: str = VLLM, task: Task = "generate", **flags: Any
) -> EngineChoice:
    return choose_engine(PDConfig(**{"device": "cuda", **flags}), architecture, program, task)


def test_a_decoder_only_model_on_cuda_gets_a_vllm_of_the_workers_own():
    choice = chosen()
    assert (choice.engine, choice.own) == ("vllm", True)
    assert VLLM in choice.reason
    assert [chosen(task=task) for task in ("embed", "score")] == [choice] * 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cpu"}, "--device is cpu"),
        ({"architecture": "WhisperForConditionalGeneration"}, "Whisper.* is not served through vLLM"),
        ({"architecture": "SmolVLMForConditionalGeneration"}, "SmolVLM.* is not served through vLLM"),
        ({"program": ""}, "vLLM.* is not installed here: pip install vllm"),
        ({"quantization": "int8"}, "--quantization is its own"),
        ({"engine": "native"}, "--engine native"),
        ({"architecture": "Gemma3ForConditionalGeneration", "task": "embed"}, "Gemma3.* pooled by vLLM"),
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


def order(arrival: float, *, resumed: bool = False) -> tuple[bool, float, str]:
    return (not resumed, arrival, f"r{arrival}")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_start_in_order_and_resumed_ones_first():
    places, started = BatchPlaces(1), []

    async def work(name: str, at: tuple[bool, float, str]) -> None:
        async with places.place(at):
            started.append(name)
            await asyncio.sleep(0)

    async with places.place(order(0.0)):
        tasks = [
            asyncio.create_task(work(name, at))
            for name, at in (
                ("late", order(3.0)),
                ("early", order(1.0)),
                ("resumed", order(9.0, resumed=True)),
            )
        ]
        await settled()
        assert started == []
    await asyncio.gather(*tasks)
    assert started == ["resumed", "early", "late"]


async def test_a_wait_cancelled_after_its_turn_came_gives_the_place_back():
    places = BatchPlaces(1)

    async def work() -> None:
        async with places.place(order(1.0)):
            raise AssertionError("it was cancelled")

    async with places.place(order(0.0)):
        task = asyncio.create_task(work())
        await settled()
    # The place is the task's now, which has not run since.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), places.place(order(2.0)):
        pass


async def test_bytes_are_reserved_together_in_order_and_shared_by_key():
    room = EmbeddingRoom(100)
    await room.reserve("a", order(0.0), {"x": 60})
    await room.reserve("b", order(1.0), {"x": 60})
    assert room.reserved == 60
    big = asyncio.create_task(room.reserve("c", order(2.0), {"y": 60}))
    small = asyncio.create_task(room.reserve("d", order(3.0), {"z": 10}))
    await settled()
    assert not big.done() and not small.done()
    room.release("a")
    await settled()
    assert not big.done()
    room.release("b")
    await asyncio.gather(big, small)
    assert room.reserved == 70


def test_failures_in_a_row_end_a_request():
    retries = Retries()
    pauses = [retries.pause(busy=False) for _ in range(MAX_FAILURES)]
    assert pauses == [0.1, 0.2, 0.4, None]


def test_a_request_that_comes_further_has_all_its_tries_again():
    retries = Retries()
    for _ in range(MAX_FAILURES - 1):
        retries.pause(busy=False)
    retries.reset()
    assert retries.pause(busy=False) == 0.1


def test_a_busy_server_is_asked_ever_more_rarely_and_never_given_up():
    retries = Retries()
    pauses = [retries.pause(busy=True) for _ in range(100)]
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0] and set(pauses[5:]) == {2.0}
    assert retries.failures == 0


def test_known_tokens_are_dropped_and_later_ones_are_new():
    replay = Replay((5, 6))
    assert [replay.is_new(token) for token in (5, 6, 5)] == [False, False, True]


def test_another_token_than_before_is_a_divergence():
    replay = Replay((5, 6))
    replay.is_new(5)
    with pytest.raises(Diverged, match="output token 1 is 7, and was 6"):
        replay.is_new(7)
