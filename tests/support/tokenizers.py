"""Small real BPE tokenizers in the two styles that the families use."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

QWEN_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
LLAVA_SPECIALS = ("<unk>", "<s>", "</s>", "<image>", "<pad>")
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: The family's own form: tools in the first system turn, calls and results between tags.
_QWEN_TEMPLATE = """\
{%- macro body(content) %}
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content %}
{%- if part.type == 'image' or 'image_url' in part %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- body(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nCall one with <tool_call>\\n{"name": ..., "arguments": {}}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + body(message.content) + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + body(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{%- set call = call.function or call %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_QWEN_SYSTEM = """\
{%- if messages[0].role != 'system' and not tools %}\
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"""
_LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def qwen_tokenizer(vocab_size: int, *, default_system: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens at the end of a vocabulary of `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(QWEN_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([_special(text) for text in QWEN_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        additional_special_tokens=list(QWEN_SPECIALS[1:]),
        chat_template=(_QWEN_SYSTEM if default_system else "") + _QWEN_TEMPLATE,
    )


def llava_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """BPE in Llama's style: `▁` for spaces, unknown characters as bytes, `<s>` put first."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    head = [*LLAVA_SPECIALS[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
    tail = LLAVA_SPECIALS[3:]
    size = vocab_size - len(head) - len(tail)
    trainer = BpeTrainer(vocab_size=size, limit_alphabet=120, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    learnt = json.loads(trained.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    vocab = {piece: index for index, piece in enumerate([*head, *pieces])}
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([_special(text) for text in LLAVA_SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=4096,
        additional_special_tokens=["<image>"],
        chat_template=_LLAVA_TEMPLATE,
    )


def _special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def corpus() -> Iterator[str]:
    """About 300 kB of source text that every Python has, and a little of other scripts."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in (
        "argparse.py",
        "ast.py",
        "asyncio/base_events.py",
        "calendar.py",
        "string.py",
        "textwrap.py",
    ):
        yield (folder / name).read_text(encoding="utf-8")
    yield "größer naïve café привет мир こんにちは 世界 你好 " * 20
