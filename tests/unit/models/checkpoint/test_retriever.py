"""The forms in which a late-interaction checkpoint's processor writes, as a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.models.checkpoint.retriever import retriever_template
from triptych.pd_worker.frontend.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "image_token": "<image>"}
PADDING = "<pad>" * 10 + "\n"


def write(path: Path, architecture: str, content: Any, role: str = "query", **settings: str) -> str:
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (path / "processor_config.json").write_text(json.dumps(settings))
    template = ChatTemplate(retriever_template(path), TOKENS)
    assert template.takes_parts
    return template.render([{"role": role, "content": content}])


@pytest.mark.parametrize(
    ("architecture", "settings", "written"),
    [
        ("ColPaliForRetrieval", {}, "<s>Question: a " + PADDING),
        ("ColQwen2ForRetrieval", {}, "Query: a " + PADDING),
        ("ColQwen2ForRetrieval", {"query_prefix": 'Say \'"{{ x }}": '}, 'Say \'"{{ x }}": a ' + PADDING),
    ],
)
def test_a_query_has_the_prefix_of_the_processor_and_padding_behind_it(
    tmp_path, architecture, settings, written
):
    assert write(tmp_path, architecture, "a ", **settings) == written


@pytest.mark.parametrize("role", ["document", "user"])
def test_a_document_is_written_as_it_is(tmp_path, role):
    parts = [{"type": "image"}, {"type": "text", "text": " a\n"}, {"type": "image"}]
    assert write(tmp_path, "ColPaliForRetrieval", parts, role) == "<image> a\n<image>"


def test_a_video_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidRequest, match="video: this model reads texts and pictures"):
        write(tmp_path, "ColPaliForRetrieval", [{"type": "video"}])


def test_other_models_have_a_template_of_their_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2VLForConditionalGeneration"]}))
    assert retriever_template(tmp_path) == ""
