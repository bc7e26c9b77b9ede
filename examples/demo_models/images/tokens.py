"""The demo model's tokenizer (byte-level BPE trained on the questions) and its chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.demo_models.images.samples import NO_IMAGE, SMALL_TALK, random_sample

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
#: Of tools the names: a small model could not read their schemas, and a server's grammar holds it to them.
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool.function.name + ' ' }}"
    "{%- endfor %}{{- '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for content in message.content %}"
    "{%- if content.type == 'image' or 'image' in content or 'image_url' in content %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif content.type == 'video' or 'video' in content %}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# As Qwen splits text: contractions, words with the space before them, single digits, marks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MOST_TOKENS = 1024
#: Joined out of trained tokens: a word in JSON is one token, as the word after a space is in a sentence.
JSON_TOKENS = (
    *("red", "green", "blue", "yellow", "purple", "orange", "black", "white"),
    *("circle", "square", "triangle", "cross", "top", "bottom", "none", "true", "false"),
    *('":', '":"', '","', '{"', '"}', '"},{"', "color", "colour", "shape", "name"),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer the user's questions about the images.",
    "You are a careful assistant. Answer in one short sentence.",
)


def corpus(seed: int = 0, samples: int = 6000) -> list[str]:
    """Questions, answers and the words around them."""
    rng = random.Random(seed)
    lines = [text for pair in SMALL_TALK for text in pair] * 20
    lines += [*SYSTEM_PROMPTS, NO_IMAGE, "user\n", "assistant\n", "system\n"] * 200
    for _ in range(samples):
        sample = random_sample(rng, "train", rng.choice((1, 2, 2, 3, 4)), 4)
        for turn in sample.turns:
            lines += [turn.question, turn.answer]
    return lines


def _with_joined(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Joins the tokens of each word to one by merges that come last, so that other text splits as before."""
    for word in words:
        while len(parts := tokenizer.encode(word, add_special_tokens=False).tokens) > 1:
            state = json.loads(tokenizer.to_str())
            vocabulary: dict[str, int] = state["model"]["vocab"]
            vocabulary |= {token["content"]: token["id"] for token in state["added_tokens"]}
            vocabulary.setdefault(parts[0] + parts[1], len(vocabulary))
            state["model"]["merges"].append(parts[:2])
            tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """At most 1024 tokens; every byte is one, so no input fails and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MOST_TOKENS - len(SPECIALS),
        min_frequency=5,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer = _with_joined(tokenizer, JSON_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIALS[1:]),
    )
