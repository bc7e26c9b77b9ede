"""A result page of these benchmarks: the command, day, device and versions, and then tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import transformers

from triptych.goodput.report.machine import chip


def device_name(device: str) -> str:
    return chip() if device == "cpu" else torch.cuda.get_device_name(device)


def page(title: str, command: str, device: str, said: str, body: Sequence[str]) -> str:
    """The page as Markdown; `said` ends the line of the command, `body` are the lines below it."""
    how = (
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {device_name(device)}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, transformers {transformers.__version__}; {said}."
    )
    return "\n".join([f"# {title}", "", how, "", *body, ""])


def table(*columns: str) -> list[str]:
    """The head of a table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
