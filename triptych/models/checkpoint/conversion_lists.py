"""Lists of a config.json's quantization: which modules it leaves as they were, and which it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from triptych.base.types import Options

#: Lists of modules that are not quantized, by the tools that write them: transformers and AWQ,
#: compressed-tensors, FP8 of vLLM, ModelOpt, bitsandbytes.
_UNCONVERTED = (
    "modules_to_not_convert",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "llm_int8_skip_modules",
)


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One entry of a list, with the list's name."""

    field: str
    entry: str

    def __str__(self) -> str:
        return f"quantization_config.{self.field} has {self.entry!r}"

    def covers(self, module: str) -> bool:
        """Whether it names the module, or one that holds it: a path or its end, a pattern, or `re:` and one
        for the whole path. Paths begin with `model.` or do not, by the release that wrote them."""
        names = (module, f"model.{module}", module.removeprefix("model."))
        if self.entry.startswith("re:"):
            return any(_search(self.entry[3:], name, whole=True) for name in names)
        return any(_search(self.entry, name, whole=False) for name in names)


class ConversionLists:
    """The lists of one quantization. What they leave unconverted comes before what they name."""

    def __init__(self, quantization: Options) -> None:
        self._unconverted = [
            ListEntry(field, entry) for field in _UNCONVERTED for entry in _words(quantization.get(field))
        ]
        groups = quantization.get("config_groups")
        parts = [quantization, *(groups.values() if isinstance(groups, dict) else ())]
        self._targets = [
            ListEntry("targets", entry)
            for part in parts
            if isinstance(part, dict)
            for entry in _words(part.get("targets"))
            # Others are classes, which a name does not tell.
            if entry.startswith("re:") or "." in entry
        ]

    def unconverted(self, module: str) -> ListEntry | None:
        """The entry that says that the module is not quantized."""
        return _first(self._unconverted, module)

    def converted(self, module: str) -> ListEntry | None:
        """The entry that says, of this module and not of its class, that it is quantized."""
        return None if self.unconverted(module) else _first(self._targets, module)


def _words(value: object) -> Iterator[str]:
    if isinstance(value, list):
        yield from (word for word in value if isinstance(word, str) and word)


def _first(entries: Iterable[ListEntry], module: str) -> ListEntry | None:
    return next((entry for entry in entries if entry.covers(module)), None)


def _search(pattern: str, name: str, *, whole: bool) -> bool:
    try:
        if whole:
            return re.match(pattern, name) is not None
        return re.search(rf"(^|\.)(?:{pattern})(\.|$)", name) is not None
    except re.error:
        return f".{pattern}." in f".{name}."
