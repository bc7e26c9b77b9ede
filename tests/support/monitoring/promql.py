"""What a PromQL expression asks for, as far as tests need it."""

from __future__ import annotations

import re

_AGGREGATIONS = {"sum", "max", "min", "avg", "count", "by", "without"}
_FUNCTIONS = {
    "rate",
    "increase",
    "changes",
    "histogram_quantile",
    "clamp_min",
    "absent",
    "time",
    "sum_over_time",
}
_OPERATORS = {"on", "ignoring", "and", "or", "unless", "bool", "offset", "vector", "group_left"}
_WORDS = _AGGREGATIONS | _FUNCTIONS | _OPERATORS
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*({[^}]*})")
_LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")


def metric_names(expr: str) -> set[str]:
    """The names of the series in an expression."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    bare = re.sub(r"\b(?:by|on|ignoring|without|group_left)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"{[^}]*}|\[[^\]]*\]", " ", bare)
    return {word for word in re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare) if word not in _WORDS}


def selectors(expr: str) -> list[tuple[str, set[str]]]:
    """Each series with the labels that it is selected by; those without a selector have none."""
    found = [(name, set(_LABEL.findall(labels))) for name, labels in _SELECTOR.findall(expr)]
    named = {name for name, _ in found}
    return found + [(name, set()) for name in metric_names(expr) - named]
