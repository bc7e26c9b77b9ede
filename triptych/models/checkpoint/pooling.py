"""What a checkpoint is made for, and how its hidden states are pooled, as its own files say it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject, Task
from triptych.models.checkpoint.folder import read_json
from triptych.models.checkpoint.retriever import is_retriever

PoolingMethod = Literal["last", "mean", "cls", "token"]

#: Those of one vector.
METHODS: tuple[PoolingMethod, ...] = ("last", "mean", "cls")
#: sentence-transformers' names of them, in `pooling_mode` or as the ends of its older flags.
_MODES: dict[str, PoolingMethod] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
}
_FLAG = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """A checkpoint's task, and how a request that says nothing of it is pooled.

    `score_ids` are the tokens whose logits give a score: for "yes", and for "no" where there is one. Without
    them a score is the first output of the class's own head. `width` is that of a retriever's vectors, of
    which each token has one.
    """

    task: Task = "generate"
    method: PoolingMethod = "last"
    normalize: bool = True
    score_ids: tuple[int, ...] = ()
    width: int = 0

    @property
    def generates(self) -> bool:
        return self.task == "generate"


#: Of a checkpoint that says nothing of pooling.
GENERATES = PoolingDefaults()


def read_pooling(path: Path, tokenizer: Tokenizer) -> PoolingDefaults:
    """By sentence-transformers' modules.json, else by the class and by config.json; ConfigError.

    `classifier_from_token` in config.json is vLLM's name for the two tokens, that for "no" first; a folder
    named as a reranker, whose class has a head for text, has the tokens "yes" and "no".
    """
    defaults, words = _read(path)
    ids = tuple(token for word in reversed(words) if (token := tokenizer.token_to_id(word)) is not None)
    if len(ids) != len(words):
        raise ConfigError(f"MODEL={path}: its tokenizer lacks one of {words}, by which it scores: correct it")
    return replace(defaults, score_ids=ids) if words else defaults


def read_task(path: Path) -> Task:
    """What the checkpoint is made for; ConfigError."""
    return _read(path)[0].task


def _read(path: Path) -> tuple[PoolingDefaults, list[str]]:
    """The defaults, and the words in whose tokens' place `score_ids` are to come."""
    modules = _modules(path / "modules.json")
    if (defaults := _of_modules(path, modules or [])) is not None:
        return defaults, []
    config = read_json(path / "config.json") or {}
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        labels = config.get("num_labels", len(config.get("id2label") or range(2)))
        if labels != 1:
            raise ConfigError(f"MODEL={path} has a head of {labels} labels: only one, a score, is served")
        return PoolingDefaults("score"), []
    if is_retriever(config):
        return PoolingDefaults("token_embed", "token", width=int(config.get("embedding_dim") or 128)), []
    words = config.get("classifier_from_token")
    if words is None and "reranker" in _name(path).lower():
        words = ["no", "yes"]
    return (GENERATES, []) if words is None else (PoolingDefaults("score"), [str(word) for word in words])


def _name(path: Path) -> str:
    """The folder's name; of a snapshot in the hub's cache that of its repository."""
    parts = path.absolute().parts
    return next((part for part in parts[-3:] if part.startswith("models--")), parts[-1])


def _modules(file: Path) -> list[dict[str, Any]] | None:
    """The list in modules.json, or None where there is no such file."""
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): fetch the checkpoint again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{file} is not a list of modules: fetch the checkpoint again")
    return modules


def _of_modules(path: Path, modules: list[dict[str, Any]]) -> PoolingDefaults | None:
    """What the modules do; None where they only hold the model, as of rerankers with a head of their own."""
    method: PoolingMethod | None = None
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        config = read_json(path / str(module.get("path", "")) / "config.json") or {}
        if kind == "LogitScore":
            return PoolingDefaults("score", score_ids=_score_ids(path, config))
        if kind == "Pooling":
            method = _method(path, config)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ConfigError(
                f"MODEL={path}: modules.json names a {kind}, which is not served: use another model"
            )
    return None if method is None else PoolingDefaults("embed", method, normalize)


def _score_ids(path: Path, config: JsonObject) -> tuple[int, ...]:
    # Of published rerankers modules.json may name another folder than the one that holds the tokens.
    others = (read_json(file) or {} for file in sorted(path.glob("*/config.json")))
    for one in (config, *others):
        if isinstance(one.get("true_token_id"), int):
            ids = (one["true_token_id"], one.get("false_token_id"))
            return tuple(token for token in ids if token is not None)
    raise ConfigError(
        f"MODEL={path}: modules.json names a LogitScore, but no folder's config.json has its true_token_id: "
        "fetch the checkpoint again"
    )


def _method(path: Path, config: dict[str, Any]) -> PoolingMethod:
    named = config.get("pooling_mode") or [
        name.removeprefix(_FLAG) for name, on in config.items() if name.startswith(_FLAG) and on is True
    ]
    modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ConfigError(
            f"MODEL={path}: its pooling {'+'.join(map(str, modes))} is not served, only one of "
            f"{', '.join(METHODS)}: use another model"
        )
    return _MODES[modes[0]]
