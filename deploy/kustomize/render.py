"""Renders the chart into `base`: plain manifests for kustomize, without Helm's labels and a namespace.

Run: python deploy/kustomize/render.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "helm" / "triptych"
_HEAD = "# Made by `python deploy/kustomize/render.py` from the chart. Change it in an overlay.\n"
_NAMESPACE = "namespace-of-the-chart"
#: Of a release's own: its labels, and the digest of users that are in a Secret of yours here.
_HELMS = ("helm.sh/chart", "app.kubernetes.io/managed-by", "checksum/users")


def base() -> dict[str, str]:
    """The files of the base by name."""
    by_component: dict[str, list[Any]] = {}
    for manifest in _manifests():
        component = manifest["metadata"]["labels"].get("app.kubernetes.io/component", "common")
        by_component.setdefault(component, []).append(manifest)
    files = {
        f"{component}.yaml": _HEAD + yaml.safe_dump_all(manifests, sort_keys=False)
        for component, manifests in sorted(by_component.items())
    }
    index = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    return files | {"kustomization.yaml": _HEAD + yaml.safe_dump(index, sort_keys=False)}


def _manifests() -> Iterator[dict[str, Any]]:
    values = yaml.safe_load((FOLDER / "values.yaml").read_text(encoding="utf-8"))
    with Chart.load(CHART) as chart:
        rendered = chart.render(values, name="triptych", namespace=_NAMESPACE)
    for path in sorted(rendered):
        if path.endswith(".yaml"):
            # A Service's name alone leads to it, in whichever namespace an overlay chooses.
            text = rendered[path].replace(f".{_NAMESPACE}.svc", "")
            text = re.sub(rf"^ *namespace: {_NAMESPACE}\n", "", text, flags=re.MULTILINE)
            for manifest in yaml.safe_load_all(text):
                if manifest:
                    yield _without_helm(manifest)


def _without_helm(value: Any) -> Any:
    """The value without what only Helm's releases have."""
    if isinstance(value, dict):
        return {key: _without_helm(inner) for key, inner in value.items() if key not in _HELMS}
    return [_without_helm(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    for old in (FOLDER / "base").glob("*.yaml"):
        old.unlink()
    for name, text in base().items():
        (FOLDER / "base" / name).write_text(text, encoding="utf-8")
