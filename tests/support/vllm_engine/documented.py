"""The commands of docs/vllm.md as words, with devices, addresses and paths replaced by one table."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
_ARGS = re.compile(r"^```yaml\nargs:\n(.*?)^```", re.MULTILINE | re.DOTALL)
_REQUEST = re.compile(r"^```json\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(triptych [a-z]+ [^`]+)`")
#: What stands for words that the page has shown already.
_REST = "…"
#: What is named in the text as a command, and is one of a block.
_MENTIONED = ("triptych pd --engine vllm",)


@dataclass(frozen=True, slots=True)
class Documented:
    """`replaced`: what the page says by what it is here; longer words first."""

    replaced: Mapping[str, str]

    def _here(self, text: str) -> str:
        for word in sorted(self.replaced, key=len, reverse=True):
            text = text.replace(word, self.replaced[word])
        return text

    def commands(self) -> list[list[str]]:
        """Those of blocks, then those in the text; a `…` is the words of the first `vllm serve`."""
        found = [words for words in self._blocks() if words[0] in ("vllm", "triptych")]
        texts = _INLINE.findall(PAGE.read_text(encoding="utf-8"))
        inline = [text for text in dict.fromkeys(texts) if text not in _MENTIONED and "--" in text]
        return found + [shlex.split(self._here(text)) for text in inline]

    def _blocks(self) -> Iterator[list[str]]:
        rest: list[str] = []
        for block in _INDENTED.findall(_FENCE.sub("", PAGE.read_text(encoding="utf-8"))):
            for words in _lines(shlex.split(self._here(block.replace("\\\n", " ")))):
                if _REST in words:
                    at = words.index(_REST)
                    words[at : at + 1] = [word for word in rest if word != "--enable-scale-out"]
                elif words[:2] == ["vllm", "serve"]:
                    rest = words[3:]
                yield words

    def args(self) -> list[str]:
        """The words behind `vllm serve MODEL` of a Pod that has the connector alone."""
        (text,) = _ARGS.findall(PAGE.read_text(encoding="utf-8"))
        joined = re.sub(r"\n {6,}", " ", self._here(text))
        return [shlex.split(line.strip().removeprefix("- "))[0] for line in joined.splitlines()]

    def request(self) -> dict[str, object]:
        """The part of a request that names an embedding."""
        (text,) = _REQUEST.findall(PAGE.read_text(encoding="utf-8"))
        return dict(json.loads(text))


def _lines(words: list[str]) -> Iterator[list[str]]:
    """Commands, which begin with a program's name and a verb; a flag's value has no verb behind it."""
    line: list[str] = []
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word in ("vllm", "triptych") and line and not following.startswith("--"):
            yield line
            line = []
        line.append(word)
    yield line
