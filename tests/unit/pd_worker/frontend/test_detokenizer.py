from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.data import trained
from triptych.base.errors import InvalidRequest
from triptych.base.types import FinishReason, SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import resolve
from triptych.pd_worker.frontend.tokenization import IncrementalDecoder, OutputText

TEXTS = (
    "Hello, world! Two  spaces and\n\nnew lines.",
    "emoji 👩‍👩‍👧 🏳️‍🌈 flags 🇩🇪 end",
    "größer naïve café привет мир こんにちは 世界 你好",
    " leading space, trailing space ",
    "𝔘𝔫𝔦 ﷽ \u200b zero width",
)


def tokenizer(style: str):
    return trained.tokenizer(style).backend_tokenizer


def encode(style: str, text: str) -> list[int]:
    return tokenizer(style).encode(text, add_special_tokens=False).ids


def sampling(**params):
    return resolve(SamplingParams(**params), GenerationDefaults(eos_token_ids=(2,)), 1, 10_000)


def run(output: OutputText, ids) -> str:
    """The text of `ids` up to the output's end, or with what was held back."""
    text = ""
    for token in ids:
        new, reason = output.append(token)
        text += new
        if reason is not None:
            return text
    return text + output.flush()


@pytest.mark.parametrize("style", ["qwen", "llava"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_tokenizers_text(style, text):
    ids = encode(style, text)
    pieces = IncrementalDecoder(tokenizer(style))
    parts = [pieces.append(token) for token in ids]
    assert "".join(parts) + pieces.flush() == tokenizer(style).decode(ids)
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", ["👩", "你", "é"])
def test_no_piece_holds_half_a_character(text):
    ids = encode("qwen", text)
    pieces = IncrementalDecoder(tokenizer("qwen"))
    parts = [pieces.append(token) for token in ids]
    assert parts[-1] == text
    assert parts[:-1] == [""] * (len(ids) - 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 599), max_size=60))
# Its last two bytes are one half character together, and two on their own.
@example([147, 175, 183, 228, 227, 247, 172, 111, 251, 108])
def test_random_bytes_come_out_as_the_tokenizer_decodes_them(ids):
    pieces = IncrementalDecoder(tokenizer("qwen"))
    text = "".join([pieces.append(token) for token in ids]) + pieces.flush()
    assert text == tokenizer("qwen").decode(ids)


def test_bytes_that_are_no_character_do_not_pile_up():
    ids = encode("qwen", "é")[-1:] * 500
    pieces = IncrementalDecoder(tokenizer("qwen"))
    text = "".join([pieces.append(token) for token in ids])
    assert len(text) > 480
    assert text + pieces.flush() == tokenizer("qwen").decode(ids)


def test_special_tokens_without_text_do_not_pile_up():
    special = tokenizer("qwen").token_to_id("<|im_end|>")
    ids = [*encode("qwen", "a"), *[special] * 300, *encode("qwen", " b")]
    pieces = IncrementalDecoder(tokenizer("qwen"))
    assert "".join([pieces.append(token) for token in ids]) == "a b"
    assert len(pieces._window) < 20


def test_an_end_token_stops_and_is_not_text():
    output = OutputText(tokenizer("llava"), sampling())
    for token in encode("llava", "Hi there"):
        output.append(token)
    assert output.append(2) == ("", FinishReason.STOP)


def test_ignore_eos_goes_on_past_the_end_token():
    ids = [*encode("llava", "Hi"), 2, *encode("llava", "you")]
    output = OutputText(tokenizer("llava"), sampling(ignore_eos=True))
    assert run(output, ids) == tokenizer("llava").decode(ids)
    assert output.finished is None


def test_max_tokens_ends_with_length_and_all_text():
    ids = encode("qwen", "one two three four")
    output = OutputText(tokenizer("qwen"), sampling(max_tokens=3, stop=("nothing",)))
    assert run(output, ids) == tokenizer("qwen").decode(ids[:3])
    assert output.finished is FinishReason.LENGTH


@pytest.mark.parametrize("style", ["qwen", "llava"])
def test_no_part_of_a_stop_string_over_several_tokens_is_sent(style):
    ids = encode(style, "The answer is 42.\nUSER: next")
    output = OutputText(tokenizer(style), sampling(stop=("\nUSER:",)))
    assert run(output, ids) == "The answer is 42."
    assert output.finished is FinishReason.STOP


def test_text_that_only_begins_a_stop_string_is_sent_in_the_end():
    ids = encode("qwen", "well </sto")
    output = OutputText(tokenizer("qwen"), sampling(stop=("</stop>",)))
    sent = "".join([output.append(token)[0] for token in ids])
    assert sent == "well "
    assert output.flush() == "</sto"
    assert output.flush() == ""


@pytest.mark.parametrize("style", ["qwen", "llava"])
def test_a_stop_string_or_token_stays_in_the_text_on_request(style):
    asked = {"include_stop_str_in_output": True}
    ids = encode(style, "The answer is 42.\nUSER: next")
    output = OutputText(tokenizer(style), sampling(stop=("\nUSER", "\nUSER:"), **asked))
    assert run(output, ids) == "The answer is 42.\nUSER"
    assert (output.finished, output.stop_sequence) == (FinishReason.STOP, "\nUSER")
    ids = encode(style, "one two three")
    output = OutputText(tokenizer(style), sampling(stop_token_ids=(ids[-1],), **asked))
    assert run(output, [*ids, *ids]) == tokenizer(style).decode(ids)
    assert run(OutputText(tokenizer("llava"), sampling(**asked)), [*encode("llava", "one"), 2]) == "one"


def test_min_tokens_lets_early_stop_strings_and_end_tokens_pass():
    ids = encode("qwen", "stop it and stop")
    first = len(encode("qwen", "stop it"))
    output = OutputText(tokenizer("qwen"), sampling(stop=("stop",), min_tokens=first))
    assert run(output, ids) == "stop it and "
    early = OutputText(tokenizer("llava"), sampling(min_tokens=3))
    assert early.append(2) == ("", None)


def test_a_stop_string_completed_before_min_tokens_does_not_stop_later():
    ids = encode("qwen", "ab")
    rest = encode("qwen", "x")
    stop = sampling(stop=("ab", "abc"), min_tokens=len(ids))
    assert run(OutputText(tokenizer("qwen"), stop), [*ids, *rest]) == "abx"


def cases():
    """(style, sampling parameters, ids) that hold text back, split characters and end in every way."""
    rng = random.Random(5)
    special = tokenizer("qwen").token_to_id("<|im_end|>")
    yield "qwen", sampling(), [*encode("qwen", TEXTS[1]), special]
    yield "qwen", sampling(stop=("end", " flags 🇩🇪 x")), encode("qwen", TEXTS[1])
    yield "qwen", sampling(max_tokens=20), encode("qwen", TEXTS[2])
    yield "qwen", sampling(stop=("\ufffd\ufffdz",)), [rng.randrange(600) for _ in range(60)]
    yield "llava", sampling(stop=("worldly", "lines.")), encode("llava", TEXTS[0])
    yield "llava", sampling(min_tokens=12, stop=("l", "two")), encode("llava", TEXTS[0])
    yield (
        "llava",
        sampling(stop=("worldly", "lines."), include_stop_str_in_output=True),
        encode("llava", TEXTS[0]),
    )
    yield "llava", sampling(ignore_eos=True), [rng.randrange(600) for _ in range(60)]


@pytest.mark.parametrize("case", range(8))
def test_a_resumed_output_goes_on_at_the_character_after_the_last_received(case):
    style, resolved, ids = list(cases())[case]
    unbroken = OutputText(tokenizer(style), resolved)
    whole, taken, sent_at = "", 0, [0]
    for token in ids:
        new, reason = unbroken.append(token)
        whole, taken = whole + new, taken + 1
        sent_at.append(len(whole))
        if reason is not None:
            break
    whole += unbroken.flush()
    for split in range(taken + 1):
        for received in {0, sent_at[split] // 2, max(0, sent_at[split] - 1), sent_at[split]}:
            resumed = OutputText(tokenizer(style), resolved, ids[:split], received)
            rest = resumed.flush() if resumed.finished else run(resumed, ids[split:taken])
            assert whole[:received] + rest == whole
            assert resumed.finished is unbroken.finished


def test_tokens_after_the_end_are_refused():
    with pytest.raises(InvalidRequest, match="output_token_ids"):
        OutputText(tokenizer("llava"), sampling(), [5, 2, 5], 0)
