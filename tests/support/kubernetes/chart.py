"""The Helm chart, rendered offline: the manifests as plain dictionaries."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "triptych"
EXAMPLES = CHART / "examples"

Manifest = dict[str, Any]
_LOOKUP = re.compile(r'lookup "v1" "Secret" (\S*)\.Release\.Namespace ([^\s)]+)')
#: libyaml's, several times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def render(
    values: Mapping[str, Any] | None = None, name: str = "triptych", namespace: str = "default"
) -> list[Manifest]:
    """The manifests of a release, in the templates' order, as `helm template` makes them.

    HelmError, with the template's own words, for values that do not fit together. Secrets that no value names
    are made anew in every rendering.
    """
    return list(manifests_of(_chart().render(dict(values or {}), name=name, namespace=namespace)))


def render_version(folder: Path, version: str, values: Mapping[str, Any] | None = None) -> list[Manifest]:
    """The manifests as a copy of the chart in `folder` makes them, where chart and app have this version."""
    shutil.copytree(CHART, folder)
    about = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": version, "appVersion": version}))
    with Chart.load(folder) as chart:
        return list(manifests_of(chart.render(dict(values or {}), name="triptych", namespace="default")))


def render_upgrade(
    folder: Path, before: Sequence[Manifest], values: Mapping[str, Any] | None = None
) -> list[Manifest]:
    """The manifests of an upgrade of a release that has made these, by a copy of the chart in `folder`.

    Its `lookup` finds the Secrets among them, which a rendering without a cluster does not.
    """
    shutil.copytree(CHART, folder)
    found = {
        one["metadata"]["name"]: {
            "data": {key: b64encode(value.encode()).decode() for key, value in one["stringData"].items()}
        }
        for one in before
        if one["kind"] == "Secret"
    }
    (folder / "found.json").write_text(json.dumps(found))
    for path in (folder / "templates").iterdir():
        text = path.read_text(encoding="utf-8")
        path.write_text(_LOOKUP.sub(r'default dict (index (\1.Files.Get "found.json" | fromJson) \2)', text))
    with Chart.load(folder) as chart:
        return list(manifests_of(chart.render(dict(values or {}), name="triptych", namespace="default")))


def notes(values: Mapping[str, Any] | None = None, name: str = "triptych", namespace: str = "default") -> str:
    """What `helm install` prints."""
    rendered = _chart().render(dict(values or {}), name=name, namespace=namespace)
    return next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))


def example(name: str) -> dict[str, Any]:
    """The values of an example, like "laptop-kind"."""
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


#: The chart's own values, and all examples.
CASES = ["defaults", *sorted(path.stem for path in EXAMPLES.glob("*.yaml"))]


@cache
def case(name: str) -> list[Manifest]:
    """The manifests of one of `CASES`. They are shared: copy what shall be changed."""
    return render(None if name == "defaults" else example(name))


def manifests_of(rendered: Mapping[str, str]) -> Iterator[Manifest]:
    """The objects of what the chart rendered, in the templates' order."""
    for path in sorted(rendered):
        if path.endswith((".yaml", ".yml")):
            yield from (one for one in yaml.load_all(rendered[path], _Loader) if one)


@cache
def _chart() -> Chart:
    return Chart.load(CHART)
