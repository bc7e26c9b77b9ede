"""Prompts of encoder-decoder models as exact token ids: the matrix of the forms that clients may send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.encdec.tokenizers import bart_tokenizer, t5_tokenizer, whisper_tokenizer
from triptych.base.errors import InternalError, InvalidRequest
from triptych.base.request import MAX_CHARS_PER_TOKEN
from triptych.base.types import ItemPlan, Placement
from triptych.models.base import PromptDefaults
from triptych.models.geometry import MAX_ROWS
from triptych.pd_worker.frontend.encdec_prompt import (
    EncDecPrompts,
    behind_default,
    behind_start,
    task_options,
)
from triptych.pd_worker.frontend.tokenization import GuardedTokenizer
from triptych.protos import common_pb2, pd_pb2

BART = PromptDefaults(2, (2, 0))
T5 = PromptDefaults(0, (0,))
#: start of transcript, language, task, no timestamps.
WHISPER = PromptDefaults(50, (50, 60, 70, 80))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((51, 178), (2, 51, 178)),
        ((2, 0, 51, 178, 2), (2, 0, 51, 178, 2)),
        ((2, 0, 171, 5, 2), (2, 0, 171, 5, 2)),
        ((2,), (2,)),
        ((0,), (2, 0)),
    ],
)
def test_ids_follow_the_start_token_which_is_not_repeated(given: Any, expected: Any) -> None:
    assert behind_start(given, BART) == expected


@pytest.mark.parametrize(
    ("defaults", "given", "expected"),
    [
        (BART, (51, 178), (2, 0, 51, 178)),
        (BART, (0, 51), (2, 0, 51)),
        (BART, (2, 0, 51), (2, 0, 51)),
        (BART, (2, 51), (2, 51)),
        (T5, (51,), (0, 51)),
        (WHISPER, (9, 8), (50, 60, 70, 80, 9, 8)),
        (WHISPER, (50, 61, 70, 9), (50, 61, 70, 9)),
        (WHISPER, (80, 9), (50, 60, 70, 80, 9)),
        (WHISPER, (70, 80), (50, 60, 70, 80)),
    ],
)
def test_text_goes_behind_the_models_own_start(defaults: Any, given: Any, expected: Any) -> None:
    assert behind_default(given, defaults) == expected


def plan_of(rows: int, modality: str = "text") -> ItemPlan:
    return ItemPlan("a" * 64, "b" * 64, modality, rows, 8, "float32", 0)


class Fixed:
    """A decoder of which only the prompt counts."""

    image_token_id = cross = None

    def __init__(self, defaults: PromptDefaults, vocab_size: int, modality: str = "text") -> None:
        self.defaults, self.modality = defaults, modality
        self.geometry = SimpleNamespace(vocab_size=vocab_size)
        self.asked: list[dict[str, Any]] = []

    def prompt_defaults(self, options: Any) -> PromptDefaults:
        self.asked.append(dict(options))
        return self.defaults


def prompts_of(tokenizer: Any, decoder: Any, max_model_len: int = 64) -> EncDecPrompts:
    backend = tokenizer.backend_tokenizer
    guarded = GuardedTokenizer(backend, bos_token=tokenizer.bos_token or "")
    return EncDecPrompts(backend, guarded, decoder, max_model_len)


@pytest.fixture(scope="module")
def bart() -> Any:
    return bart_tokenizer(400)


@pytest.fixture(scope="module")
def whisper() -> Any:
    return whisper_tokenizer(400)


def submit(encoder: Any = None, decoder: Any = None, **fields: Any) -> pd_pb2.SubmitRequest:
    message = pd_pb2.SubmitRequest(**fields)
    if encoder is not None:
        _fill(message.encoder_prompt, encoder)
    if decoder is not None:
        _fill(message.prompt, decoder)
    return message


def _fill(message: Any, value: Any) -> None:
    if isinstance(value, str):
        message.text = value
    else:
        message.token_ids.CopyFrom(common_pb2.TokenIds(ids=value))


def test_a_text_of_few_tokens_for_its_characters_is_taken_as_the_encoder_has() -> None:
    """Of T5, what it does not know is one token, however long."""
    t5 = t5_tokenizer(400)
    text = f"a{'世' * 1000}b"
    ids = t5(text)["input_ids"]
    assert len(ids) * MAX_CHARS_PER_TOKEN < len(text)
    two = prompts_of(t5, Fixed(T5, 400)).build(submit(text), [plan_of(len(ids))])
    assert two.encoder_token_ids == tuple(ids)


def test_every_form_of_encoder_prompt_with_every_form_of_decoder_prompt(bart: Any) -> None:
    prompts = prompts_of(bart, Fixed(BART, 400))
    inner = bart("Hi", add_special_tokens=False)["input_ids"]
    encoders = {"Hi": [0, *inner, 2], (2, 0, 171, 5, 2): [2, 0, 171, 5, 2]}
    decoders: dict[Any, Any] = {
        None: (2, 0),
        "Hi": (2, 0, *inner, 2),
        "</s><s>Hi</s>": (2, 0, *inner, 2),
        "<s>Hi": (2, 0, *inner, 2),
        (51, 178): (2, 51, 178),
        (2, 0, 51, 178, 2): (2, 0, 51, 178, 2),
    }
    assert encoders["Hi"] == bart("Hi")["input_ids"]
    for encoder, encoder_ids in encoders.items():
        for decoder, decoder_ids in decoders.items():
            two = prompts.build(submit(encoder, decoder), [plan_of(len(encoder_ids))])
            assert two.encoder_token_ids == tuple(encoder_ids)
            assert two.prompt.token_ids == decoder_ids
            assert [feature.placement for feature in two.prompt.features] == [Placement(0, 0)]


def test_a_t5_text_has_its_end_token_on_both_sides() -> None:
    tokenizer = t5_tokenizer(300)
    prompts = prompts_of(tokenizer, Fixed(T5, 300))
    inner = tokenizer("Hi", add_special_tokens=False)["input_ids"]
    two = prompts.build(submit("Hi", "Hi"), [plan_of(len(inner) + 1)])
    assert two.encoder_token_ids == (*inner, 1)
    assert two.prompt.token_ids == (0, *inner, 1)
    assert prompts.build(submit("Hi"), [plan_of(len(inner) + 1)]).prompt.token_ids == (0,)


def test_with_audio_text_and_ids_are_the_decoders(whisper: Any) -> None:
    start, *control = (
        whisper.convert_tokens_to_ids(token)
        for token in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    )
    decoder = Fixed(PromptDefaults(start, (start, *control)), len(whisper), "audio")
    prompts = prompts_of(whisper, decoder)
    plans = [plan_of(1500, "audio")]
    text = whisper(" The rain", add_special_tokens=False)["input_ids"]
    assert prompts.build(submit(None, " The rain"), plans).prompt.token_ids == (start, *control, *text)
    explicit, alone = submit(None, (2, 0, 171, 5, 2)), submit(None, (2, 0, 171, 5, 2))
    alone.prompt.unmodified = True
    assert prompts.build(explicit, plans).prompt.token_ids == (start, 2, 0, 171, 5, 2)
    assert prompts.build(alone, plans).prompt.token_ids == (2, 0, 171, 5, 2)
    assert prompts.build(submit(None, (start, 5)), plans).prompt.token_ids == (start, 5)
    assert prompts.build(submit(), plans).prompt.token_ids == (start, *control)
    assert prompts.build(submit(), plans).encoder_token_ids == ()
    written = "<|startoftranscript|><|de|><|translate|>"
    said = whisper(written, add_special_tokens=False)["input_ids"]
    assert prompts.build(submit(None, written), plans).prompt.token_ids == tuple(said)


def test_a_transcriptions_prompt_reaches_the_family_as_transformers_has_it(whisper: Any) -> None:
    start = whisper.convert_tokens_to_ids("<|startoftranscript|>")
    decoder = Fixed(PromptDefaults(start, (start,)), len(whisper), "audio")
    prompts = prompts_of(whisper, decoder)
    task = common_pb2.Transcription(language="de", task="translate", prompt=" Glossary: Triptych ")
    two = prompts.build(submit(transcription=task), [plan_of(1500, "audio")])
    said = tuple(whisper.get_prompt_ids("Glossary: Triptych").tolist()[1:])
    assert decoder.asked == [{"language": "de", "task": "translate", "prompt_ids": said}] == [two.options]


def test_no_text_of_a_transcriptions_prompt_becomes_a_special_token(whisper: Any) -> None:
    start = whisper.convert_tokens_to_ids("<|startoftranscript|>")
    prompts = prompts_of(whisper, Fixed(PromptDefaults(start, (start,)), len(whisper), "audio"))
    task = common_pb2.Transcription(prompt="<|startoftranscript|><|fr|>")
    ids = prompts.build(submit(transcription=task), [plan_of(1500, "audio")]).options["prompt_ids"]
    assert start not in ids and whisper.convert_tokens_to_ids("<|fr|>") not in ids


def test_a_resumed_prompt_is_taken_up_as_it_was(bart: Any) -> None:
    prompts = prompts_of(bart, Fixed(BART, 400))
    message = submit((5, 6), resume=pd_pb2.Resume(prompt_token_ids=[7, 8, 9]))
    two = prompts.build(message, [plan_of(2)])
    assert two.prompt.token_ids == (7, 8, 9) and two.encoder_token_ids == (5, 6)


def test_options_name_only_what_was_asked_for() -> None:
    assert task_options(common_pb2.Transcription()) == {}
    message = common_pb2.Transcription(language="en", timestamps=True, detect_language=True)
    assert task_options(message) == {"language": "en", "timestamps": True, "detect_language": True}


REFUSED = [
    ({"encoder": (5,), "messages": b"[]"}, 1, "messages"),
    ({"encoder": (5,)}, 0, "encoder_prompt"),
    ({"encoder": (5,)}, 2, "encoder_prompt"),
    ({"encoder": (5,), "decoder": (400,)}, 1, "prompt"),
    ({"encoder": (5,), "decoder": ()}, 1, "prompt"),
    ({"encoder": (5,), "decoder": "x" * 9000}, 1, "prompt"),
    ({"encoder": "x" * (MAX_ROWS * MAX_CHARS_PER_TOKEN + 1)}, 1, "encoder_prompt"),
    ({"encoder": (5,), "transcription": common_pb2.Transcription(task="translate")}, 1, "transcription"),
    ({"encoder": (5,), "resume": pd_pb2.Resume(prompt_token_ids=[400])}, 1, "resume"),
]


@pytest.mark.parametrize(("fields", "items", "param"), REFUSED)
def test_what_cannot_be_is_refused_by_field(bart: Any, fields: Any, items: int, param: str) -> None:
    prompts = prompts_of(bart, Fixed(BART, 400))
    with pytest.raises(InvalidRequest) as refused:
        prompts.build(submit(**fields), [plan_of(1)] * items)
    assert refused.value.param == param


def test_an_encoder_with_another_tokenizer_is_our_fault(bart: Any) -> None:
    with pytest.raises(InternalError, match="different tokenizers"):
        prompts_of(bart, Fixed(BART, 400)).build(submit("Hello there"), [plan_of(99)])
