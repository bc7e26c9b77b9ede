"""A line to paste once a cluster answers: what its kind of model can be asked."""

from __future__ import annotations

import json
from pathlib import Path

_SPEECH = frozenset({"whisper"})
_TEXTS = frozenset({"bart", "mbart", "t5"})
_PICTURES = frozenset({"vision-encoder-decoder"})


def first_request(model: Path, command: str, url: str) -> str:
    """The line for the checkpoint at `model`; `command` is how to call `triptych`."""
    kind = model_type(model)
    if kind in _SPEECH:
        return f"{command} transcribe /path/to/speech.wav --url {url}"
    if kind in _TEXTS:
        return _completion(url, {"prompt": "A long article", "max_tokens": 64})
    if kind in _PICTURES:
        return _completion(url, {"multi_modal_data": {"image": "https://…"}, "max_tokens": 64})
    return f'{command} ask "What is in the image?" --image /path/to/picture.png --url {url}'


def _completion(url: str, body: dict[str, object]) -> str:
    data = json.dumps(body, ensure_ascii=False)
    return f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{data}'"


def model_type(model: Path) -> str:
    """As its config.json says; empty where that cannot be read."""
    try:
        return str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""
