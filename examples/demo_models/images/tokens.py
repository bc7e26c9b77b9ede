"""The demo model's tokenizer (byte-level BPE trained on the questions) and its chat template."""

from __future__ import annotations

import random

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
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for content in message.content %}"
    "{%- if content.type == 'image' or 'image' in content or 'image_url' in content %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif content.type == 'video' or 'video' in content %}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# As Qwen splits text: contractions, words with the space before them, single digits, marks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MOST_TOKENS = 1024
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIALS[1:]),
    )
