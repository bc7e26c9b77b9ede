"""Strict checks of manifests by schema: Kubernetes' own kinds, and the chart's custom resources."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from kubernetes_validate.utils import schema_contents  # type: ignore[import-untyped]
from referencing import Registry, Resource

from support.kubernetes.chart import Manifest

_CUSTOM = Path(__file__).parent / "custom_resources.json"


def validate(manifest: Manifest, version: str) -> None:
    """ValidationError for a field that the object's kind does not have, or a value that it does not take.

    `version` is Kubernetes', like "1.30".
    """
    group, _, number = manifest["apiVersion"].rpartition("/")
    if "." in group and not group.endswith(".k8s.io") or group.startswith(("gateway.", "inference.")):
        _custom().validate(manifest)
        return
    short = "-".join(one for one in (group.partition(".")[0], number) if one)
    _kubernetes(f"{manifest['kind'].lower()}-{short}", version).validate(manifest)


@cache
def _custom() -> Draft202012Validator:
    return Draft202012Validator(json.loads(_CUSTOM.read_text(encoding="utf-8")))


@cache
def _kubernetes(name: str, version: str) -> Draft202012Validator:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema = schema_contents(f"{folder}/{name}.json", version)
    registry: Registry[object] = Resource.from_contents(schema) @ _definitions(folder, version)
    return Draft202012Validator(schema, registry=registry)


@cache
def _definitions(folder: str, version: str) -> Registry[object]:
    found: Registry[object] = Registry()
    return Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version)) @ found
