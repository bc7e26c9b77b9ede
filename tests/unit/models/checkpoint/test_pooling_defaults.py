"""A checkpoint's own files say what it is made for, and how it is pooled."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from triptych.base.errors import ConfigError
from triptych.models.checkpoint.pooling import GENERATES, PoolingDefaults, read_pooling

TOKENIZER = Tokenizer(WordLevel({"yes": 4, "no": 9}, unk_token="no"))
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
CLASS = {"architectures": ["Qwen3VLForConditionalGeneration"]}
HEAD = {"architectures": ["Gemma3ForSequenceClassification"]}
BY_TWO = PoolingDefaults("score", score_ids=(4, 9))
MODULES = "sentence_transformers.models"


def folder(tmp_path, name="model", config=None, **modules):
    """A checkpoint with these configs of modules, by class name; no modules.json where there are none."""
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or CLASS))
    listed = [{"idx": 0, "path": "", "type": f"{MODULES}.Transformer"}]
    for number, (kind, settings) in enumerate(modules.items(), 1):
        (path / f"{number}_{kind}").mkdir()
        (path / f"{number}_{kind}" / "config.json").write_text(json.dumps(settings))
        listed.append({"idx": number, "path": f"{number}_{kind}", "type": f"{MODULES}.{kind}"})
    if modules:
        (path / "modules.json").write_text(json.dumps(listed))
    return path


@pytest.mark.parametrize(
    ("modules", "defaults"),
    [
        ({}, GENERATES),
        ({"Pooling": LAST, "Normalize": {}}, PoolingDefaults("embed", "last", True)),
        ({"Pooling": {"pooling_mode": "mean"}}, PoolingDefaults("embed", "mean", False)),
        ({"Pooling": {"pooling_mode_cls_token": True}}, PoolingDefaults("embed", "cls", False)),
        ({"LogitScore": {"true_token_id": 4, "false_token_id": 9}}, BY_TWO),
        ({"LogitScore": {"true_token_id": 0}}, PoolingDefaults("score", score_ids=(0,))),
    ],
)
def test_modules_of_sentence_transformers_decide(tmp_path, modules, defaults):
    assert read_pooling(folder(tmp_path, **modules), TOKENIZER) == defaults


def test_a_score_head_is_found_where_modules_json_names_another_folder(tmp_path):
    path = folder(tmp_path, LogitScore={"true_token_id": 4, "false_token_id": 9})
    listed = (path / "modules.json").read_text()
    (path / "modules.json").write_text(listed.replace("1_LogitScore", "1_ScoreHead"))
    assert read_pooling(path, TOKENIZER) == BY_TWO
    (path / "1_LogitScore" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="true_token_id"):
        read_pooling(path, TOKENIZER)


def test_modules_that_hold_the_model_alone_leave_the_decision_to_its_class(tmp_path):
    path = folder(tmp_path, config=HEAD | {"id2label": {"0": "relevant"}}, Normalize={})
    (path / "modules.json").write_text(json.dumps([{"idx": 0, "path": "", "type": f"{MODULES}.Transformer"}]))
    assert read_pooling(path, TOKENIZER) == PoolingDefaults("score")


@pytest.mark.parametrize(
    ("name", "config", "defaults"),
    [
        ("model", HEAD | {"id2label": {"0": "relevant"}}, PoolingDefaults("score")),
        ("model", {"classifier_from_token": ["no", "yes"]}, PoolingDefaults("score", score_ids=(4, 9))),
        ("Qwen3-VL-Reranker-2B", {}, PoolingDefaults("score", score_ids=(4, 9))),
        ("Qwen3-VL-Embedding-2B", {}, GENERATES),
    ],
)
def test_without_modules_the_class_the_config_or_the_name_decides(tmp_path, name, config, defaults):
    assert read_pooling(folder(tmp_path, name, config), TOKENIZER) == defaults


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ({"Pooling": {"pooling_mode": "max"}}, "max"),
        ({"Pooling": {"pooling_mode": ["cls", "mean"]}}, r"cls\+mean"),
        ({"Pooling": {"pooling_mode": "mean"}, "Dense": {}}, "Dense"),
    ],
)
def test_what_would_give_other_vectors_than_the_checkpoint_s_is_not_served(tmp_path, modules, named):
    with pytest.raises(ConfigError, match=named):
        read_pooling(folder(tmp_path, **modules), TOKENIZER)


@pytest.mark.parametrize("labels", [{}, {"id2label": {"0": "no", "1": "yes"}}])
def test_a_head_of_several_labels_is_not_served(tmp_path, labels):
    with pytest.raises(ConfigError, match="2 labels"):
        read_pooling(folder(tmp_path, config=HEAD | labels), TOKENIZER)


def test_tokens_that_the_tokenizer_lacks_are_named(tmp_path):
    with pytest.raises(ConfigError, match="relevant"):
        read_pooling(folder(tmp_path, config={"classifier_from_token": ["no", "relevant"]}), TOKENIZER)
