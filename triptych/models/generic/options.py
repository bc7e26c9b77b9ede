"""The settings of a processor that a request may change by `mm_processor_kwargs`, and their limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers.image_utils import SizeDict

from triptych.base.errors import InvalidRequest
from triptych.base.types import Options

#: What the tower or the tensors' form depends on, and `do_resize`: without it pictures have no limit.
_FIXED = re.compile(
    "(patch|merge|kernel|tile)_size$|downsampl|seq_length$|resample$|slice_mode$"
    "|^(do_resize|rescale_factor|default_to_square|disable_grouping|return_row_col_info)$"
)
#: Other names of two entries of `size`.
_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class ProcessorOptions:
    """The flags, numbers and sizes of a processor of pictures or videos.

    `defaults` are the settings that it is called with. A request may lower a number, but not raise it.
    """

    def __init__(self, processor: Any, defaults: Options) -> None:
        own = {name: getattr(processor, name, None) for name in processor.valid_kwargs.__annotations__}
        own |= {name: value for name, value in defaults.items() if name in own}
        size = dict(own.get("size") or {})
        own |= {name: size.get(edge) for name, edge in _PIXELS.items() if name in own}
        self._limits: dict[str, dict[str, Any]] = {}
        for name, value in own.items():
            sizes = dict(value) if isinstance(value, Mapping | SizeDict) else {"": value}
            if not _FIXED.search(name) and all(isinstance(each, int | float) for each in sizes.values()):
                self._limits[name] = {side: _limit(side, sizes) for side in sizes}
        for name in self._limits:
            upper = self._limits.get(name.replace("min", "max", 1))
            if upper is not None:
                self._limits[name] = upper

    def check(self, options: Options) -> None:
        """InvalidRequest, naming the setting, for one that is unknown, of another kind or above its limit."""
        for name, value in options.items():
            if (limits := self._limits.get(name)) is None:
                known = ", ".join(sorted(self._limits)) or "none"
                raise _refusal(name, f"unknown mm_processor_kwargs option {name!r}: this model knows {known}")
            given = value if isinstance(value, Mapping) else dict.fromkeys(limits, value)
            if not given or not all(_is_like(number, limits.get(side)) for side, number in given.items()):
                raise _refusal(name, f"mm_processor_kwargs option {name!r} has an invalid value")
            for side, number in given.items():
                if number > limits[side]:
                    raise _refusal(
                        name,
                        f"{name} {number} exceeds this model's limit of {limits[side]}: give a smaller one",
                    )


def _limit(side: str, sizes: Mapping[str, Any]) -> Any:
    """A shorter edge may be as long as the longer one."""
    value = sizes.get("longest_edge", sizes[side]) if side == "shortest_edge" else sizes[side]
    return True if isinstance(value, bool) else value


def _is_like(value: object, limit: object) -> bool:
    """Whether it is a flag where the limit is one, else a number above 0, and a whole one where that is."""
    if isinstance(limit, bool) or isinstance(value, bool):
        return isinstance(limit, bool) and isinstance(value, bool)
    kinds = (int, float) if isinstance(limit, float) else int
    return limit is not None and isinstance(value, kinds) and value > 0


def _refusal(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=f"mm_processor_kwargs.{name}")
