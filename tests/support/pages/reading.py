"""Pages of documents: their hand-written text, words, links, anchors and names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: Pages that a script makes as a whole.
MADE = frozenset({"docs/cli.md", "docs/promises.md", "deploy/helm/triptych/README.md"})
#: `openssl` marks commands for a test, not text of a script.
_BLOCK = re.compile(r"<!-- (?!openssl)[\w-]+(: begin)? -->\n.*?\n<!-- (/[\w-]+|[\w-]+: end) -->", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    .*$", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> dict[str, str]:
    """The text of every page by its path in the repository."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy/helm/triptych/README.md"]
    paths += sorted((ROOT / "docs").rglob("*.md"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def hand_written(text: str) -> str:
    """The text without what a script writes between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    return _BLOCK.sub("", text)


def anchors(text: str) -> set[str]:
    """What links may name behind `#`, as GitHub makes it of headings."""
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", bare).replace(" ", "-"))
    return found


def links(text: str) -> list[str]:
    """The relative targets of links and pictures."""
    bare = re.sub(r"`[^`\n]*`", "`", _INDENTED.sub("", _FENCE.sub("", text)))
    return [target for target in _LINK.findall(bare) if not re.match(r"[a-z]+:", target)]


def code(text: str) -> str:
    """All that stands in backticks, fences or indented blocks, one piece a line."""
    outside = _INDENTED.sub("", _FENCE.sub("", text))
    return "\n".join([*re.findall(r"`([^`\n]+)`", outside), *_FENCE.findall(text), *_INDENTED.findall(text)])
