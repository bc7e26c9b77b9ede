"""The architecture that config.json names, against transformers' sources, which are read and not imported.

Importing transformers takes seconds and its classes bring torch: a service says at once what it cannot serve.
"""

from __future__ import annotations

import ast
import re
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych.models.checkpoint.refused_classes import LACKING, refused_class

#: The entry points of adapters from outside: an architecture's name, and its adapter.
ADAPTERS = "triptych.models"
#: Mappings of classes that generate from texts alone, and of those that take something beside a text.
_TEXT = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_MEDIA = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "VISION_2_SEQ")
#: Parts of config.json that only a model with pictures, videos or sounds has.
_PARTS = re.compile(r"vision|visual|image|video|audio|speech|mm_")


def check_architecture(path: Path, config: JsonObject) -> None:
    """ConfigError for an architecture that neither transformers nor an adapter has, or that no worker loads.

    `config` is config.json's content. Where it names no architecture, or transformers has no sources here,
    loading tells.
    """
    named, mappings = [str(one) for one in config.get("architectures") or ()], _mappings()
    if not named or not mappings or any(entry_points(group=ADAPTERS, name=one) for one in named):
        return
    known = frozenset[str]().union(*mappings.values())
    if not any(name in known or _is_defined(name) for name in named):
        raise unknown_architecture(path, named)
    of_text = all(name in mappings.get(_TEXT, ()) and name not in _of_media() for name in named)
    if of_text and not any(_PARTS.search(key) for key in config):
        raise ConfigError(f"MODEL={path}: {', '.join(named)} takes text alone: serve it with vLLM or SGLang")
    if refused := refused_class(named[0]):
        raise ConfigError(f"MODEL={path}: {named[0]} cannot be served ({refused.reason}): {refused.instead}")


def unknown_architecture(path: Path, named: list[str]) -> ConfigError:
    """Names the architecture, the nearest one that there is, and what to give instead."""
    if lacking := LACKING.get(named[0] if named else ""):
        return ConfigError(
            f"MODEL={path} is {lacking}: serve it with a vLLM of its own, or give another MODEL"
        )
    near = get_close_matches(named[0] if named else "", sorted(_of_media()), 1)
    hint = f" (the nearest one is {near[0]})" if near else ""
    return ConfigError(
        f"MODEL={path} is of an unknown architecture, {', '.join(named) or 'no name'}{hint}: give one of the "
        "classes in docs/models.md, or install a package with its adapter or the transformers that has it "
        "(remote code is never run)"
    )


def _of_media() -> frozenset[str]:
    """Classes that generate from something beside a text."""
    return frozenset(
        name for kind in _MEDIA for name in _mappings().get(f"MODEL_FOR_{kind}_MAPPING_NAMES", ())
    )


@cache
def _mappings() -> dict[str, frozenset[str]]:
    """Names of classes by transformers' mapping (`MODEL_FOR_…_MAPPING_NAMES`); empty without transformers."""
    folder = model_sources()
    file = folder and folder / "auto" / "modeling_auto.py"
    if not file or not file.is_file():
        return {}
    found: dict[str, frozenset[str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id.endswith("_MAPPING_NAMES"):
            values = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            found[target.id] = frozenset(value for value in values if isinstance(value, str))
    return found


def _is_defined(name: str) -> bool:
    """Whether a class that no mapping names is defined by transformers."""
    folder, defined = model_sources(), re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    files = folder.glob("*/modeling_*.py") if folder else ()
    return any(defined.search(file.read_text(encoding="utf-8")) for file in files)


def model_sources() -> Path | None:
    """transformers' folder of models."""
    spec = find_spec("transformers")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "models" if places else None
