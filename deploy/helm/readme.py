"""Writes the chart's README.md: its values as tables, from the schema and the defaults.

Run: python deploy/helm/readme.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "triptych"
_HEAD = """\
# The chart triptych

Made by `python deploy/helm/readme.py` from `values.schema.json` and `values.yaml`. How to install, and what
was checked: [docs/kubernetes.md](../../../docs/kubernetes.md).

    helm install demo deploy/helm/triptych --values deploy/helm/triptych/examples/laptop-kind.yaml
"""
_LISTS = "Each entry is a pool; its `name` is needed."


def readme() -> str:
    """The text of README.md."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    blocks = [_HEAD]
    single: list[str] = []
    for name, one in schema["properties"].items():
        if name == "global":
            continue
        inner = one.get("properties") or one.get("items", {}).get("properties")
        if not inner:
            single.append(_row(name, one, defaults.get(name)))
            continue
        rows = list(_rows(one, defaults[name], name) if "properties" in one else _items(name, inner))
        blocks.append(f"## `{name}`\n\n{_sentence(one)}\n\n{_table(rows)}")
    blocks.insert(1, f"## Values without a block\n\n{_table(single)}")
    return "\n".join(blocks)


def _rows(schema: Mapping[str, Any], defaults: Mapping[str, Any], path: str) -> Iterator[str]:
    """The rows of an object's values, those of its objects' after dots."""
    for name, one in schema["properties"].items():
        inner = f"{path}.{name}"
        if "properties" in one and defaults.get(name):
            yield from _rows(one, defaults[name], inner)
        else:
            yield _row(inner, one, defaults.get(name))


def _items(path: str, properties: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a pool's own values; the others are those of its defaults."""
    others = [name for name, one in properties.items() if one["description"].startswith("in place of")]
    for name, one in properties.items():
        if name not in others:
            yield _row(f"{path}[].{name}", one, None)
    block = properties[others[0]]["description"].split()[-1].partition(".")[0]
    yield f"| `{path}[].*` | | every value of [`{block}`](#{block}), in its place |"


def _row(path: str, schema: Mapping[str, Any], default: object) -> str:
    text = schema["description"].replace("|", "\\|")
    if choices := schema.get("enum"):
        text += f". One of {', '.join(f'`{one}`' for one in choices)}"
    shown = "" if default is None or default in ("", [], {}) else f"`{_inline(default)}`"
    return f"| `{path}` | {shown} | {text} |"


def _inline(value: object) -> str:
    """A value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _sentence(schema: Mapping[str, Any]) -> str:
    text: str = schema["description"]
    more = f" {_LISTS}" if schema["type"] == "array" else ""
    return f"{text[0].upper()}{text[1:]}.{more}"


def _table(rows: list[str]) -> str:
    return "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme(), encoding="utf-8")
