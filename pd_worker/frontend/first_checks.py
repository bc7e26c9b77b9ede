"""What of a PD worker's flags is refused before a process is started or torch imported."""

from __future__ import annotations

from triptych.base.config import PDConfig
from triptych.pd_worker.frontend.reasoning import check_reasoning_parser
from triptych.pd_worker.frontend.tool_format import find_tool_format
from triptych.pd_worker.item_limits import parse_item_limits


def check_pd_flags(flags: PDConfig) -> None:
    """ConfigError for a value that a PD worker would refuse once it has started."""
    find_tool_format(flags.tool_call_parser, "")
    check_reasoning_parser(flags.reasoning_parser)
    parse_item_limits(flags.limit_mm_per_prompt)
