"""Settings of vLLM's server, and sampling as it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.trained import tokenizer as trained_tokenizer
from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import OutputFormat, SamplingParams, Task
from triptych.models.base import GenerationDefaults
from triptych.pd_worker import service
from triptych.pd_worker.core.sampling import ResolvedSampling, resolve
from triptych.pd_worker.frontend.grammar import GrammarCompiler
from triptych.pd_worker.vllm.calls import EngineFormats, check_sampling, engine_seed, replays, sampling_params
from triptych.pd_worker.vllm.connection import (
    EngineChoice,
    check_engine,
    check_native,
    choose_engine,
    read_key,
)

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
        ({"speculative_config": "{}"}, "give it to the server at --engine-url"),
    ],
)
def test_a_mistake_names_the_flag_and_the_remedy(given, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_engine(replace(GOOD, **given))
    assert "secret" not in str(error.value)


async def test_a_vllm_of_the_workers_own_gets_no_flag_of_the_native_engine(monkeypatch):
    """It would be ignored, and weights in 8 bits would be asked for by a name that vLLM's have not."""
    monkeypatch.setattr(service, "vllm_program", lambda: "/usr/bin/vllm")
    config = PDConfig(model=str(build_checkpoint("qwen3_vl")), engine="vllm", device="cpu")
    for given, flag in (({"quantization": "int8"}, "--quantization"), ({"block_size": 32}, "--block-size")):
        with pytest.raises(ConfigError, match=f"{flag} is for --engine native: .*you start and name by"):
            await service.run(replace(config, **given))


def test_the_native_engine_takes_no_connector_of_vllm():
    check_native(replace(GOOD, kv_connector="none"))
    with pytest.raises(ConfigError, match="--kv-connector nixl is for --engine vllm"):
        check_native(replace(GOOD, kv_connector="nixl"))


def test_the_native_engine_does_not_speculate():
    with pytest.raises(ConfigError, match="--speculative-config is for --engine vllm"):
        check_native(replace(GOOD, speculative_config='{"method": "ngram"}'))


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
        ({"architecture": "Idefics3ForConditionalGeneration"}, "Idefics3.* is not served through vLLM"),
        ({"architecture": "KimiK25ForConditionalGeneration"}, "KimiK25.* was not run .*ends with it on CPUs"),
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


def test_a_class_that_the_table_lacks_is_tried_where_that_is_asked_for():
    idefics = "Idefics3ForConditionalGeneration"
    assert chosen(idefics).engine == "native"
    assert chosen(idefics, engine_class="generic").engine == "vllm"
    assert chosen("KimiK25ForConditionalGeneration", engine_class="generic").engine == "vllm"
    assert chosen(idefics, engine_class="generic", device="cpu").engine == "native"
    with pytest.raises(ConfigError, match="--engine-class generic.*leave --engine-class out"):
        check_native(PDConfig(engine_class="generic"))


@pytest.mark.parametrize("flags", [{"engine": "vllm"}, {"engine_url": URL}])
def test_vectors_of_tokens_are_the_native_engine_s_whatever_is_asked_for(flags):
    retriever = "ColQwen2ForRetrieval"
    assert chosen(retriever, task="token_embed").engine == "native"
    with pytest.raises(ConfigError, match=f"{retriever}.*leave out --engine"):
        chosen(retriever, task="token_embed", **flags)


def test_vllm_that_is_asked_for_is_started_on_any_device_or_its_absence_told():
    assert chosen(engine="vllm", device="cpu").own
    with pytest.raises(ConfigError, match="no vLLM is installed here: pip install vllm"):
        chosen(engine="vllm", program="")


DEFAULTS = GenerationDefaults(eos_token_ids=(2, 7))
FORMAT = OutputFormat("json_object")


def resolved(**given: object) -> ResolvedSampling:
    return resolve(SamplingParams(**{"max_tokens": 20, **given}), DEFAULTS, 10, 100)


def params(received: tuple[int, ...] = (), *, replay: bool = False, **given: object) -> dict[str, object]:
    return sampling_params(resolved(**given), received, None, replay=replay)


def test_a_greedy_request_says_how_it_ends_and_nothing_of_chance():
    assert params() == {
        "max_tokens": 20,
        "min_tokens": 0,
        "ignore_eos": True,
        "stop_token_ids": [2, 7],
        "detokenize": False,
        "temperature": 0.0,
    }


def test_stop_tokens_are_the_clients_and_the_checkpoints():
    assert params(stop_token_ids=(5,))["stop_token_ids"] == [2, 5, 7]


def test_a_continuation_counts_the_tokens_that_have_come():
    made = params((4, 4, 6), min_tokens=5)
    assert (made["max_tokens"], made["min_tokens"]) == (17, 2)


def test_a_replay_counts_from_the_prompt():
    made = params((4, 4, 6), replay=True, min_tokens=5)
    assert (made["max_tokens"], made["min_tokens"]) == (20, 5)


def test_the_least_number_of_tokens_counts_though_the_end_is_ignored():
    # Both engines forbid end-of-sequence tokens before it, ignored or not.
    assert params(ignore_eos=True, min_tokens=5)["min_tokens"] == 5


def test_bad_words_pass_as_texts_and_those_of_several_tokens_are_generated_again():
    assert params(bad_words=("sea", "of"))["bad_words"] == ["sea", "of"]
    assert "bad_words" not in params()
    single = replace(resolved(), bad_words=("sea",), bad_word_ids=((1,), (2,)))
    several = replace(resolved(), bad_words=("seaside",), bad_word_ids=((1,), (2, 5)))
    assert replays(several, (4,), None) and not replays(single, (4,), None) and not replays(several, (), None)


def test_a_sampled_request_has_all_of_its_parameters():
    made = params(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=3)
    assert {name: made[name] for name in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
    }


def test_choices_and_continuations_draw_other_numbers_and_repetitions_the_same():
    seeds = [engine_seed(3, 0, 0), engine_seed(3, 1, 0), engine_seed(4, 0, 0), engine_seed(3, 0, 5)]
    assert len(set(seeds)) == 4 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert params((4, 4), temperature=1.0, seed=3)["seed"] == engine_seed(3, 0, 2)
    assert params((4, 4), replay=True, temperature=1.0, seed=3)["seed"] == engine_seed(3, 0, 0)


def test_penalties_pass_and_those_that_are_off_are_left_out():
    made = params(presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2)
    assert (made["presence_penalty"], made["frequency_penalty"]) == (0.5, -0.5)
    assert made["repetition_penalty"] == 1.2
    assert not {"presence_penalty", "frequency_penalty", "repetition_penalty"} & params().keys()


def test_tokens_before_a_continuation_are_penalised_by_a_bias():
    made = params((4, 4, 6), presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((6, 1.0), (9, 2.0)))
    assert made["logit_bias"] == {"4": -1.0, "6": 0.25, "9": 2.0}


def test_one_more_logprob_is_asked_for_than_is_reported():
    assert "logprobs" not in params()
    assert [params(logprobs=count)["logprobs"] for count in (0, 1, 19, 20)] == [0, 2, 20, 20]


@pytest.mark.parametrize(
    ("output_format", "expected"),
    [
        (OutputFormat("json_object"), {"json_object": True}),
        (
            OutputFormat("json_schema", '{"type": "object", "x-guidance": {"a": 1}}'),
            {"json": {"type": "object"}},
        ),
        (OutputFormat("regex", "[ab]+"), {"regex": "[ab]+"}),
        (OutputFormat("choices", choices=("yes", "no", "yes")), {"choice": ["yes", "no"]}),
    ],
)
def test_an_output_format_is_one_of_vllms(output_format, expected):
    made = sampling_params(resolved(), (), output_format, replay=False)
    assert made["structured_outputs"] == expected


def test_vllm_is_sent_the_closed_schema():
    tokenizer = trained_tokenizer("qwen")
    formats = EngineFormats(GrammarCompiler(tokenizer.backend_tokenizer, (tokenizer.eos_token_id,)))
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}}
    for as_written, expected in ((False, {**schema, "additionalProperties": False}), (True, schema)):
        state = formats.state(OutputFormat("json_schema", json.dumps(schema), open=as_written))
        made = sampling_params(resolved(), (), state.output_format, replay=False)
        assert made["structured_outputs"] == {"json": expected}


@pytest.mark.parametrize(
    ("given", "output_format", "field"),
    [({"temperature": 2.5}, None, "temperature"), ({"min_tokens": 3}, FORMAT, "min_tokens")],
)
def test_what_vllm_cannot_do_is_refused_by_name(given, output_format, field):
    sampling = replace(resolved(), **given)
    with pytest.raises(InvalidRequest, match="vLLM") as refused:
        check_sampling(sampling, output_format)
    assert refused.value.param == field


def test_only_formats_and_presence_penalties_are_generated_again():
    plain, present = resolved(), resolved(presence_penalty=0.1)
    assert (
        not replays(plain, (4,), None) and not replays(present, (), None) and not replays(plain, (), FORMAT)
    )
    assert replays(present, (4,), None) and replays(plain, (4,), FORMAT)


def test_beside_speculation_what_vllm_does_not_take_is_refused_by_name():
    for given, field in (
        ({"logit_bias": ((5, 1.0),)}, "logit_bias"),
        ({"min_p": 0.1, "temperature": 1.0}, "min_p"),
    ):
        with pytest.raises(InvalidRequest, match="beside speculative decoding") as error:
            check_sampling(resolved(**given), None, speculates=True)
        assert error.value.param == field
        check_sampling(resolved(**given), None)
    check_sampling(resolved(min_p=0.1, temperature=0.0), None, speculates=True)


def test_beside_speculation_frequencies_are_counted_by_generating_again():
    often = resolved(frequency_penalty=0.5)
    assert replays(often, (4,), None, speculates=True)
    assert not replays(often, (), None, speculates=True) and not replays(often, (4,), None)
    biased = sampling_params(often, (4, 4), None, replay=False)
    assert biased["logit_bias"] == {"4": -1.0}
    assert "logit_bias" not in sampling_params(often, (4, 4), None, replay=False, speculates=True)
