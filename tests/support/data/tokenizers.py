"""Small real BPE tokenizers in the two styles that the families use.

Their pieces were learnt once, from some hundred kB of source text, and are kept in a file: learnt anew, they
would follow the text and the library at hand, and with them the tokens that every reference is made of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PIECES_FILE = Path(__file__).parent / "tokenizer_pieces.json"
#: By style: merges in the order in which they were learnt, an alphabet, pieces of a unigram with scores.
PIECES = json.loads(PIECES_FILE.read_text(encoding="utf-8"))
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
{%- elif part.type == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
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
    size = vocab_size - len(QWEN_SPECIALS)
    tokenizer = Tokenizer(models.BPE(*learnt("qwen", byte_alphabet(), size)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
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
    head = [*LLAVA_SPECIALS[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES["llama_alphabet"]]
    vocab, merges = learnt("llama", head, vocab_size - len(LLAVA_SPECIALS[3:]))
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


def byte_alphabet() -> list[str]:
    """The 256 bytes as byte-level BPE writes them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def learnt(style: str, head: Sequence[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary of `size` pieces, `head` first, and the merges that make the others."""
    merges = [tuple(merge.split(" ")) for merge in PIECES[style][: size - len(head)]]
    vocab = {piece: index for index, piece in enumerate([*head, *(left + right for left, right in merges)])}
    if len(vocab) != size:
        raise ValueError(f"{PIECES_FILE.name} has pieces for {len(vocab)} of {style}, not for {size}")
    return vocab, merges
