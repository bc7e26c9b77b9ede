"""Writes the blocking client, triptych/apps/client/client.py, from the one for asyncio beside it.

Run: python tests/tools/sync_client.py; with --check it fails, and writes nothing, where the file is another.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

CLIENT = Path(__file__).resolve().parents[2] / "triptych/apps/client"
_SOURCE, _GENERATED = "async_client.py", "client.py"
_HEAD = f"# Made from {_SOURCE} by `make client`: change that one.\n"
_NAMES = {
    "AsyncChunks": "Chunks",
    "AsyncClient": "Client",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_bytes": "iter_bytes",
    "aread": "read",
    "asyncio": "time",
    "in_thread": "at_once",
}


def generated() -> str:
    """The text of the blocking client."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, _SOURCE), Path(folder, _GENERATED)
        shutil.copy(CLIENT / _SOURCE, source)
        unasync.unasync_files([str(source)], [unasync.Rule(_SOURCE, _GENERATED, _NAMES)])
        made.write_text(_HEAD + made.read_text(encoding="utf-8"), encoding="utf-8")
        # The project's rules, as for the file's place in the tree.
        ruff = [sys.executable, "-m", "ruff"]
        config = ["--config", str(CLIENT.parents[2] / "pyproject.toml"), "-q", str(made)]
        subprocess.run([*ruff, "check", "--fix", "--select", "I", *config], check=True)
        subprocess.run([*ruff, "format", *config], check=True)
        return made.read_text(encoding="utf-8")


def main(words: list[str]) -> str:
    """Writes or checks the file; what is wrong, else nothing."""
    path, text = CLIENT / _GENERATED, generated()
    if "--check" not in words:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        return f"{path.relative_to(CLIENT.parents[2])} is not what {_SOURCE} gives: run `make client`"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
