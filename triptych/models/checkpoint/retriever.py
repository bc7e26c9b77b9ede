"""Late-interaction retrievers (ColPali, ColQwen2): which checkpoints they are, how they read messages."""

from __future__ import annotations

import json
from pathlib import Path

from triptych.base.types import JsonObject
from triptych.models.checkpoint.folder import SETTINGS_FILES, read_json

#: How transformers' names of these classes end.
_SUFFIX = "ForRetrieval"
#: By class: what its processor writes before a query, and the prefix where its settings name none.
_QUERIES = {"ColPaliForRetrieval": ("{{ bos_token }}", "Question: "), "ColQwen2ForRetrieval": ("", "Query: ")}
#: Padding tokens behind a query, in which the model can write more of what is asked for.
_AUGMENTATION = 10


def is_retriever(config: JsonObject) -> bool:
    """Whether config.json is that of a model with one vector for each token."""
    return any(str(name).endswith(_SUFFIX) for name in config.get("architectures") or ())


def retriever_template(path: Path) -> str:
    """A chat template of the forms in which the checkpoint's processor writes; empty for another model.

    A message with the role "query" is written as a query. What others hold is written as it is: a picture's
    placeholder has the words around it that the processor writes.
    """
    config = read_json(path / "config.json") or {}
    if not is_retriever(config):
        return ""
    known = (_QUERIES[name] for name in config["architectures"] if name in _QUERIES)
    start, prefix = next(known, ("", "Query: "))
    for file in SETTINGS_FILES:
        prefix = (read_json(path / file) or {}).get("query_prefix") or prefix
    image = "{{ image_token }}"
    return (
        "{%- for message in messages -%}"
        f"{{%- if message.role == 'query' -%}}{start}{{{{ {json.dumps(prefix)} }}}}{{%- endif -%}}"
        "{%- for part in message.content -%}"
        f"{{%- if part.type == 'image' -%}}{image}"
        "{%- elif part.type == 'text' -%}{{ part.text }}"
        "{%- else -%}{{ raise_exception(part.type ~ ': this model reads texts and pictures') }}{%- endif -%}"
        "{%- endfor -%}"
        f"{{%- if message.role == 'query' -%}}{{{{ pad_token * {_AUGMENTATION} ~ '\\n' }}}}{{%- endif -%}}"
        "{%- endfor -%}"
    )
