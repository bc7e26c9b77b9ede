"""The project's address, and the links that are made of it."""

from __future__ import annotations

import re

#: Where the project is published, like https://host/owner/triptych; empty until its owner sets it.
PROJECT_URL = ""
#: Documents by what a reader is there to do.
DOCUMENTS = {
    "Documentation": "docs/api.md",
    "Operations": "docs/operations.md",
    "Contributing": "CONTRIBUTING.md",
    "Changelog": "CHANGELOG.md",
}
#: A Markdown link, or with `!` a picture, to a path of the repository.
_RELATIVE = re.compile(r"(!?)\[[^\]]*\]\((?![a-z]+:|[#/])")


def links(project: str = PROJECT_URL) -> dict[str, str]:
    """The documents' addresses by role; none where the project has no address."""
    return {role: f"{project}/blob/main/{path}" for role, path in DOCUMENTS.items()} if project else {}


def with_absolute_links(text: str, project: str = PROJECT_URL) -> str:
    """Markdown for a page outside of the repository; unchanged where the project has no address."""
    if not project:
        return text
    return _RELATIVE.sub(lambda m: f"{m[0]}{project}/{'raw' if m[1] else 'blob'}/main/", text)
