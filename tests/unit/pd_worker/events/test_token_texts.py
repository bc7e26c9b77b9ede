from __future__ import annotations

import pytest

from support.data.trained import tokenizer
from triptych.base.metrics import PDMetrics
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.pd_worker.worker import load_report

TEXT = "A naïve café: 你好 🙂🙃 \n\tx = f(1)"


@pytest.mark.parametrize("style", ["qwen", "llava"])
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(style):
    made = tokenizer(style)
    texts = TokenTexts(made.backend_tokenizer)
    ids = made(TEXT, add_special_tokens=False)["input_ids"]
    utf8 = b"".join(texts[token][1] for token in ids)
    assert utf8.decode().removeprefix(" ") == TEXT


@pytest.mark.parametrize("style", ["qwen", "llava"])
def test_half_a_character_is_a_replacement_in_text_and_whole_in_bytes(style):
    made = tokenizer(style)
    texts = TokenTexts(made.backend_tokenizer)
    pieces = [texts[token] for token in made("🙂", add_special_tokens=False)["input_ids"]]
    halves = [(text, utf8) for text, utf8 in pieces if b"\xf0" in utf8]
    assert halves == [("\ufffd", b"\xf0")]
    assert b"".join(utf8 for _, utf8 in pieces).endswith("🙂".encode())


@pytest.mark.parametrize(("style", "end"), [("qwen", "<|im_end|>"), ("llava", "</s>")])
def test_a_special_token_stands_for_its_name(style, end):
    made = tokenizer(style)
    assert TokenTexts(made.backend_tokenizer)[made.convert_tokens_to_ids(end)] == (end, end.encode())


def test_an_id_beyond_the_vocabulary_stands_for_nothing():
    assert TokenTexts(tokenizer("qwen").backend_tokenizer)[10**6] == ("", b"")


@pytest.mark.parametrize("style", ["qwen", "llava"])
def test_every_token_has_the_bytes_that_the_tokenizer_decodes(style):
    made = tokenizer(style)
    texts = TokenTexts(made.backend_tokenizer)
    # Between two letters no decoder strips anything.
    a = made.convert_tokens_to_ids("a")
    for token in set(range(texts.size)) - texts.special_ids:
        decoded = made.backend_tokenizer.decode([a, token, a])
        if "\ufffd" not in decoded:
            assert decoded[1:-1] == texts[token][0], token


def test_the_report_has_the_values_of_the_metrics() -> None:
    metrics = PDMetrics("model")
    metrics.requests_running.set(3)
    metrics.requests_waiting.set(2)
    metrics.kv_cache_usage.set(0.5)
    metrics.encoder_cache_bytes.set(1 << 20)
    metrics.generation_tokens.inc(77)
    report = load_report(metrics, 4 << 20)
    assert (report.running, report.waiting, report.generated_tokens) == (3, 2, 77)
    assert (report.kv_usage, report.cache_usage) == (0.5, 0.25)


def test_a_worker_without_an_encoder_cache_uses_none_of_it() -> None:
    assert load_report(PDMetrics("model"), 0).cache_usage == 0.0
