"""The tokenizer: any text goes in and comes out again; words of the questions are single tokens."""

import pytest
from transformers import PreTrainedTokenizerFast

from examples.demo_models.images.tokens import SPECIALS


@pytest.mark.parametrize(
    "text",
    [
        "A red circle at the top left.",
        "  two  spaces\n\n",
        "naïve 日本語 🦊 \x00",
        "DON'T 12345",
        "",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_words_of_answers_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    answer = "A red circle at the top left and a purple triangle at the bottom right."
    assert len(tokenizer(answer)["input_ids"]) == len(answer.split()) + 1


def test_special_tokens_are_single_and_left_out_on_request(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tokenizer("".join(SPECIALS))["input_ids"]
    assert len(ids) == len(SPECIALS) == len(set(ids))
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_the_chat_template_takes_strings_and_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:"}},
                {"type": "image"},
                {"type": "text", "text": "What changed?"},
            ],
        },
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        f"{image}{image}What changed?<|im_end|>\n<|im_start|>assistant\n"
    )
