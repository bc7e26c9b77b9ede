"""A checkpoint that reasons: a tiny Qwen3-VL whose template opens its turn with `<think>`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.data.checkpoints import build_checkpoint

#: Tokens that a picture's prompt does not use become the markers.
MARKERS = {"<|vision_pad|>": "<think>", "<|video_pad|>": "</think>"}
_OPENING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_REASONS = """\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}\
{%- elif not hybrid %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""


def reasoning_checkpoint(folder: Path, *, special: bool = False) -> Path:
    """Made in `folder`. The template variable `hybrid` leaves the beginning of reasoning to the model.

    Qwen's markers are no `special` tokens, Mistral's are.
    """
    shutil.copytree(build_checkpoint("qwen3_vl"), folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in MARKERS.items():
            text = text.replace(old, new)
        values = json.loads(text)
        for token in values.get("added_tokens", ()):
            token["special"] &= special or token["content"] not in MARKERS.values()
        if not special and "additional_special_tokens" in values:
            kept = [text for text in values["additional_special_tokens"] if text not in MARKERS.values()]
            values["additional_special_tokens"] = kept
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    template = folder / "chat_template.jinja"
    source = template.read_text(encoding="utf-8")
    assert _OPENING in source
    template.write_text(source.replace(_OPENING, _REASONS), encoding="utf-8")
    return folder
