"""A newcomer's first change, made in a clone: a boolean field of an endpoint, a counter and a test.

    python tests/tools/first_contribution.py [--all]

clones HEAD, writes the change by hand into as few files as the house asks for, then says `make generated` and
`make lint`, and runs the unit tests of the changed modules and pages; with --all all unit tests. It fails
where a change of this kind needs more files, or a second command for what is generated. An edit whose text is
no more in its file names the file: write the edit anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 7


class Edit(NamedTuple):
    """Text that goes into a file behind text that it has once; behind its end without."""

    file: str
    behind: str
    text: str


CHANGE = [
    Edit(
        "proxy/openai/chat/request.py",
        "    triptych_timings: TimingsWanted = None\n",
        "    triptych_version: Annotated[\n"
        '        bool | None, Meta(description="Report the version of the proxy that answers.")\n'
        "    ] = None\n",
    ),
    Edit("proxy/openai/chat/request.py", "    reasoning: bool = True\n", "    version: bool = False\n"),
    Edit(
        "proxy/openai/chat/request.py",
        "        timings=bool(body.triptych_timings),\n",
        "        version=bool(body.triptych_version),\n",
    ),
    Edit(
        "proxy/openai/chat/endpoint.py",
        "from typing import ClassVar, TypeVar\n\n",
        "from triptych import __version__\n",
    ),
    Edit(
        "proxy/openai/chat/endpoint.py",
        "        call, options = request\n",
        "        if options.version:\n            self.dispatcher.metrics.versions_shown.inc()\n",
    ),
    Edit(
        "proxy/openai/chat/endpoint.py",
        '            extra["triptych_timings"] = timings_body(done.timings)\n',
        "        if done.final and self._options.version:\n"
        '            extra["triptych_version"] = __version__\n',
    ),
    Edit(
        "proxy/openai/chat/endpoint.py",
        '        reply["triptych_timings"] = timings_body(last.timings)\n',
        '    if options.version:\n        reply["triptych_version"] = __version__\n',
    ),
    Edit(
        "triptych/base/metrics.py",
        '    refusals = _counter("triptych_refusals", "requests refused for their API key", "reason")\n',
        '    versions_shown = _counter("triptych_versions_shown", "replies that say the proxy\'s version")\n',
    ),
    Edit(
        "triptych/apps/client/fields.py", "    stream_options: JsonObject\n", "    triptych_version: bool\n"
    ),
    Edit(
        "docs/api.md",
        "each stage's seconds and each embedding's origin |\n",
        "| `triptych_version` | bool | adds the version of the proxy |\n",
    ),
    Edit(
        "tests/unit/proxy/openai/chat/test_endpoint.py",
        "import msgspec\n\n",
        "from triptych import __version__\n",
    ),
    Edit(
        "tests/unit/proxy/openai/chat/test_endpoint.py",
        "",
        """

async def test_a_reply_has_the_proxys_version_where_it_is_asked_for_and_is_counted() -> None:
    dispatcher = Queued()
    client = Client(dispatcher, extra=b', "triptych_version": true')
    dispatcher.output.put(DONE)
    async with asyncio.timeout(30):
        await client.answer
    assert chunks(b"".join(client.parts))[-1]["triptych_version"] == __version__
    counted = dispatcher.metrics.registry.get_sample_value("triptych_versions_shown_total")
    assert counted == 1
""",
    ),
]


class Clone:
    """A clone of HEAD that borrows this checkout's environment, so that nothing is installed anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run("git", "clone", "-q", "--shared", str(ROOT), str(folder), where=ROOT)
        (folder / ".venv").symlink_to(ROOT / ".venv")

    def write(self, edit: Edit) -> None:
        file = self.folder / edit.file
        text = file.read_text(encoding="utf-8")
        if edit.behind and text.count(edit.behind) != 1:
            sys.exit(f"{edit.file} does not have this text once: {edit.behind!r}")
        before, _, after = text.partition(edit.behind) if edit.behind else (text, "", "")
        file.write_text(before + edit.behind + edit.text + after, encoding="utf-8")

    def make(self, *words: str) -> None:
        """A target of the Makefile; the borrowed environment is not made again for newer files."""
        old = [word for stamp in (".packages", ".installed", ".proxy") for word in ("-o", f".venv/{stamp}")]
        self._run("make", *old, *words)

    def test(self, *words: str) -> None:
        self._run(".venv/bin/python", "-m", "pytest", "-q", "-n0", "-m", "not slow and not gpu", *words)

    def units_of(self, module: str) -> list[str]:
        return self._run(".venv/bin/python", "tests/tools/tests_of.py", module, shown=False).split()

    def changed(self) -> set[str]:
        return set(self._run("git", "diff", "--name-only", shown=False).split())

    def _run(self, *words: str, where: Path | None = None, shown: bool = True) -> str:
        known = {**os.environ, "PYTHONPATH": str(self.folder)}
        output = None if shown else subprocess.PIPE
        done = subprocess.run(
            words, cwd=where or self.folder, env=known, stdout=output, text=True, timeout=1800, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(words)}: exit code {done.returncode}")
        return done.stdout or ""


def main(everything: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Clone(Path(folder) / "triptych")
        for edit in CHANGE:
            clone.write(edit)
        by_hand = clone.changed()
        clone.make("generated")
        generated = clone.changed() - by_hand
        print(f"by hand {len(by_hand)}: {sorted(by_hand)}\ngenerated {len(generated)}: {sorted(generated)}")
        if len(by_hand) > MOST_FILES:
            sys.exit(f"{len(by_hand)} files by hand: {MOST_FILES} have to suffice")
        clone.make("lint")
        if everything:
            clone.test("tests/unit")
            return
        modules = [name for name in sorted(by_hand) if name.endswith(".py") and not name.startswith("tests/")]
        tests = {test for module in modules for test in clone.units_of(module)}
        clone.test(*sorted(tests | {"tests/unit/docs", "tests/unit/client", "tests/unit/test_tree.py"}))


if __name__ == "__main__":
    main("--all" in sys.argv[1:])
