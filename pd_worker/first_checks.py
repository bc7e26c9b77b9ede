"""What of a PD worker's flags is refused before a process is started or torch imported, in a second at most."""

from __future__ import annotations

from pathlib import Path

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.models.checkpoint.folder import read_config
from triptych.pd_worker.frontend.reasoning import check_reasoning_parser
from triptych.pd_worker.frontend.tool_format import find_tool_format
from triptych.pd_worker.item_limits import parse_item_limits


def check_pd_flags(path: Path, flags: PDConfig) -> None:
    """ConfigError for a flag's value that a PD worker of this checkpoint would refuse once it has started."""
    find_tool_format(flags.tool_call_parser, "")
    check_reasoning_parser(flags.reasoning_parser)
    parse_item_limits(flags.limit_mm_per_prompt)
    # vLLM, which `auto` may choose on a GPU, has its own rules for lengths.
    elsewhere = flags.engine == "vllm" or flags.engine_url or flags.device.startswith("cuda")
    if flags.engine == "native" or not elsewhere:
        if limit := _positions(path):
            check_length(flags.max_model_len, limit)


def check_length(asked: int, limit: int) -> None:
    """ConfigError for a --max-model-len above the checkpoint's positions."""
    if asked > limit:
        raise ConfigError(
            f"--max-model-len {asked} is above the checkpoint's {limit} positions: lower it"
        )


def _positions(path: Path) -> int:
    """The decoder's positions; 0 where config.json does not say them, and a class's default counts."""
    config = read_config(path)
    limit = config.get("text_config", config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else 0
