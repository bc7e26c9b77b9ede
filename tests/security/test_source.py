"""Group 7: nothing in the source can turn foreign bytes into code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "proxy",
    "encoder_worker",
    "pd_worker",
    "ec_connector",
    "triptych",
    "triptych_bench",
    "protos",
    "benchmarks",
    "deploy",
    "examples",
    "tests",
)
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.save",
    "numpy.load",
}
CALLS |= {
    "np.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pandas.read_pickle",
    "tempfile.mktemp",
}
LAST_WORDS = {call.rpartition(".")[2] for call in CALLS}
#: Arguments that switch such code on.
SWITCHES = {"trust_remote_code": True, "allow_pickle": True, "weights_only": False, "shell": True}
#: What a file must hold for one of them to be in it: most are not even parsed.
SUSPICIOUS = re.compile(
    "|".join(
        rf"\b{word}\b" for word in [*MODULES, *SWITCHES, *(call.replace(".", r"\s*\.\s*") for call in CALLS)]
    )
)


def test_every_folder_with_python_is_looked_through() -> None:
    made = {"build", "dist"}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0].isalpha()]
    assert {path.name for path in folders if any(path.rglob("*.py"))} - made == set(FOLDERS)


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not any(part.is_symlink() for part in path.parents) and not path.name.endswith(
                ("_pb2.py", "_grpc.py")
            ):
                yield path


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {name.name}" for name in names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=module) if module and module.split(".")[0] in MODULES:
                yield f"from {module}"
            case ast.Call(func=func, keywords=keywords):
                last = getattr(func, "attr", getattr(func, "id", ""))
                if last in LAST_WORDS and ast.unparse(func) in CALLS:
                    yield f"{ast.unparse(func)}()"
                for keyword in keywords:
                    if (
                        keyword.arg in SWITCHES
                        and isinstance(keyword.value, ast.Constant)
                        and keyword.value.value is SWITCHES[keyword.arg]
                    ):
                        yield f"{keyword.arg}={keyword.value.value}"


def test_no_source_deserialises_or_runs_foreign_code() -> None:
    files = list(sources())
    assert len(files) > 200
    found = [
        f"{path.relative_to(ROOT)}: {what}"
        for path in files
        if SUSPICIOUS.search(text := path.read_text())
        for what in findings(ast.parse(text))
    ]
    assert found == []
