"""Every page names what exists, and all of them together can be read in a morning."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from support.pages.command_line import option_names, variables
from support.pages.reading import MADE, ROOT, anchors, code, hand_written, links, pages

PAGES = pages()
MAX_PAGES, MAX_WORDS, MAX_README = 30, 36_000, 600
EACH = pytest.mark.parametrize("page", PAGES)
#: Folders that names of files may be relative to.
BASES = (
    *(
        "",
        "docs/",
        "proxy/",
        "encoder_worker/",
        "pd_worker/",
        "deploy/",
        "deploy/helm/triptych/",
        "benchmarks/",
        "tests/",
    ),
    *("triptych/", "triptych/base/", "triptych/apps/", "triptych/models/", "triptych/models/families/"),
    *("ec_connector/", "triptych/store/"),
    *("triptych/models/generic/", "triptych/demo/examples/", "proxy/openai/chat/"),
)
#: What pages name although a user, a build or a checkpoint makes it.
ELSEWHERE = {
    *(
        "values.yaml",
        "config.json",
        "cluster.json",
        "tokenizer.json",
        "modules.json",
        "preprocessor_config.json",
    ),
    *("picture.png", "benchmarks/results/gpu.md", "DIR/targets.json"),
}
#: Flags of other programs, and of programs of ours that are no commands of `triptych`.
OTHERS = """
--arrival-pattern --backend --cap-drop --check --constraint --convert --create-namespace --data --decode
--delete-emptydir-data --ec-transfer-config --enable-mm-embeds --enable-mm-global-cache
--enable-prompt-tokens-details --enable-scale-out --encoder-transfer-backend --endpoint-type
--extra-inputs --fail-with-body --file --filename --from-file --head --hf-overrides --ignore-daemonsets --isl
--kv-transfer-config --max-loras --migration-limit --namespace --osl --pooler-config --profile --read-only
--rehearse --request-count --request-rate --results --retry --retry-all-errors --retry-delay
--runner --save-result --set --streaming --strict --structured-outputs-config
--tmpfs --tokenizer --trust-remote-code --trust-request-chat-template --ui --use-server-token-count
--values --wait --write
"""


@cache
def _functions(file: str) -> frozenset[str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return frozenset(re.findall(r"(?:def|class) (\w+)", text))


@cache
def _file_names() -> frozenset[str]:
    return frozenset(path.name for path in (ROOT / "tests").rglob("*.py"))


def test_pages_and_words_stay_readable() -> None:
    written = {page: len(hand_written(text).split()) for page, text in PAGES.items() if page not in MADE}
    remedy = (
        "say it once, link to where it is said, or give a table a script (`begin` to `end` is not counted)"
    )
    assert len(written) <= MAX_PAGES, f"{len(written)} pages: merge this one into another"
    longest = sorted(written.items(), key=lambda row: -row[1])[:8]
    assert sum(written.values()) <= MAX_WORDS, f"{sum(written.values())} words by hand: {remedy}. {longest}"
    assert written["README.md"] <= MAX_README, f"README.md has {written['README.md']} words: {remedy}"
    assert written["CONTRIBUTING.md"] <= MAX_README, (
        f"CONTRIBUTING.md: {written['CONTRIBUTING.md']} words: {remedy}"
    )


@EACH
def test_links_lead_to_files_and_headings_that_are_there(page: str) -> None:
    broken = []
    for target in links(PAGES[page]):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md" and anchor not in _anchors(file.resolve()):
            broken.append(f"{target}: no such heading")
    assert not broken, f"{page}: {broken}: name what is there now, or repair the link"


@cache
def _anchors(file: Path) -> frozenset[str]:
    return frozenset(anchors(file.read_text(encoding="utf-8")))


@EACH
def test_tests_that_are_named_are_there(page: str) -> None:
    missing = []
    for file, names in re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)`", PAGES[page]):
        wanted = [name for name in names.split("::") if name]
        if not (ROOT / file).is_file() or not set(wanted) <= _functions(file):
            missing.append(file + names)
    missing += [name for name in re.findall(r"`(test_\w+\.py)`", PAGES[page]) if name not in _file_names()]
    assert not missing, f"{page}: no such test: {missing}: name the one that shows it now"


@EACH
def test_flags_are_those_of_a_command(page: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", code(PAGES[page])))
    unknown = sorted(named - option_names() - set(OTHERS.split()))
    assert not unknown, f"{page}: {unknown}: no option of ours (docs/cli.md) and none of OTHERS in this test"


@EACH
def test_files_and_folders_that_are_named_are_there(page: str) -> None:
    spans = re.findall(r"`([\w./*-]+)`", hand_written(PAGES[page]))
    suffixes = r"\.(py|md|yaml|toml|json|sh|cpp|tpl|proto|svg|txt|sbatch|TOML)"
    files = {one for one in spans if re.search(rf"\w{suffixes}$", one) or re.fullmatch(r"[a-z_][\w/]*/", one)}
    missing = [one for one in sorted(files - ELSEWHERE) if not _is_there(one)]
    assert not missing, f"{page}: no such file or folder: {missing}"


def _is_there(name: str) -> bool:
    if name.startswith(("/", "NAME", "~")) or "NAME" in name or name in _file_names():
        return True
    return any((ROOT / base / name).exists() for base in BASES)


@EACH
def test_targets_of_make_are_there(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    there = {
        word for line in re.findall(r"^([\w. -]+):(?!=)", makefile, re.MULTILINE) for word in line.split()
    }
    named = set(re.findall(r"(?:^|\n|[(;&] ?)\s*make ([a-z][\w-]+)", code(PAGES[page])))
    assert named <= there, f"{page}: no such target: {sorted(named - there)}"


def test_variables_are_read_somewhere() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"TRIPTYCH_[A-Z_]*[A-Z]", text)}
    code_of_tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    unread = sorted(name for name in named - variables() if name not in code_of_tests)
    assert not unread, f"no option and no test reads {unread}"
