"""PlannedModel: the sizes of any image-text checkpoint, read from its config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import ConfigError
from triptych_bench.simulator.costs.costs import QWEN3_VL_4B, QWEN3_VL_4B_SHAPE, Geometry, ModelShape

#: Where configs have their two halves; a config without the latter is the text's own.
_VISION = ("vision_config", "vit_config", "visual")
_TEXT = ("text_config", "llm_config", "language_config")
#: Fields of encoders that take pictures of any size: patches along a side of a row.
_MERGES = (
    "spatial_merge_size",
    "merge_kernel_size",
    "merge_size",
    "pooling_kernel_size",
    "downsample_factor",
)
#: Values of `layer_types` whose layers keep a state of one size in the place of keys and values.
_RECURRENT = ("linear_attention", "conv", "mamba", "hybrid")
#: Fields of a processor above this are pixels, others the side of a picture.
_PIXELS = 1 << 14


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The model that a named device is planned with."""

    name: str
    geometry: Geometry
    shape: ModelShape


QWEN3_VL = PlannedModel("Qwen3-VL-4B", QWEN3_VL_4B, QWEN3_VL_4B_SHAPE)


def read_model(path: Path) -> PlannedModel:
    """The model of a checkpoint folder or a config.json; ConfigError names what it does not say."""
    file = path / "config.json" if path.is_dir() else path
    config = _Fields(f"--model {path}", _whole_config(file, f"--model {path}"))
    vision, text = config.part(_VISION), config.part(_TEXT, config)
    name = path.resolve().name if path.is_dir() else str(config.values.get("model_type", path.stem))
    patch = vision.number("patch_size")
    merge = vision.number(*_MERGES, default=config.number(*_MERGES, default=0))
    if merge:
        pixels, rows = _pixel_limits(file.parent, vision.number("image_size", default=0)), 0
    else:
        side = max(1, vision.number("image_size") // patch)
        rows = _fixed_rows(config, side * side)
        merge, pixels = round(math.sqrt(side * side / rows)), (1, (side * patch) ** 2)
    geometry = _geometry(config, text, vision, patch, merge)
    return PlannedModel(name, geometry, geometry.shape(*pixels, rows))


class _Fields:
    """The fields of a config under the names that model families have for them."""

    def __init__(self, flag: str, values: Mapping[str, Any]) -> None:
        self._flag = flag
        self.values = values

    def part(self, names: tuple[str, ...], default: _Fields | None = None) -> _Fields:
        for name in names:
            if isinstance(values := self.values.get(name), dict):
                return _Fields(self._flag, values)
        if default is None:
            raise ConfigError(f"{self._flag} has no {names[0]}: plans are for models that take images")
        return default

    def number(self, *names: str, default: int | None = None) -> int:
        """A count; of a list the first. ConfigError where there is none and no default."""
        for name in names:
            value = self.values.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and value > 0:
                return value
        if default is None:
            raise ConfigError(
                f"{self._flag} does not say {' or '.join(names)}: add it to a copy of config.json, or "
                "measure with `triptych profile` and give its file as --gpu"
            )
        return default

    def entries(self, name: str) -> list[object]:
        return value if isinstance(value := self.values.get(name), list) else []


def _whole_config(file: Path, flag: str) -> dict[str, Any]:
    """The config with its class's defaults, where transformers is installed and knows the class."""
    try:
        raw: object = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{flag}: {file.name}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{flag} is not a JSON object: give a folder with config.json, or that file")
    try:
        from triptych.models.checkpoint.config import load_config

        whole: dict[str, Any] = load_config(file).to_dict()
        return whole
    except (ImportError, ConfigError):
        return raw


def _geometry(config: _Fields, text: _Fields, vision: _Fields, patch: int, merge: int) -> Geometry:
    hidden, heads = text.number("hidden_size", "n_embd"), text.number("num_attention_heads", "n_head")
    wide = text.number("intermediate_size", "ffn_hidden_size", default=4 * hidden)
    experts = text.number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    used = stored = wide
    if experts:
        width = text.number("moe_intermediate_size", "expert_dim", default=wide)
        shared = text.number(
            "shared_expert_intermediate_size", default=width * text.number("n_shared_experts", default=0)
        )
        used = shared + width * text.number("num_experts_per_tok", "top_k_experts", "num_experts_per_token")
        stored = shared + width * experts
    vit_hidden = vision.number("embed_dim", "hidden_size")
    vit_wide = vision.number("intermediate_size", default=vit_hidden * vision.number("mlp_ratio", default=4))
    # A gated MLP has three matrices, where Geometry counts two.
    gated = vision.values.get("hidden_act") == "silu"
    layers = text.number("num_hidden_layers", "n_layer")
    recurrent = sum(kind in _RECURRENT for kind in text.entries("layer_types"))
    return Geometry(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=text.number("num_key_value_heads", default=heads),
        head_dim=text.number("head_dim", default=max(1, hidden // heads)),
        intermediate=used,
        vocab=text.number("vocab_size", default=config.number("vocab_size", default=0)) or 1,
        vit_layers=vision.number("depth", "num_hidden_layers"),
        vit_hidden=vit_hidden,
        vit_intermediate=vit_wide * 3 // 2 if gated else vit_wide,
        patch=patch,
        merge=merge,
        deepstack=len(vision.entries("deepstack_visual_indexes")),
        stored_intermediate=stored,
        recurrent_layers=min(recurrent, layers - 1),
    )


def _fixed_rows(config: _Fields, patches: int) -> int:
    """The rows of a picture of one size; pictures that are cut into tiles have one tile here."""
    if rows := config.number("mm_tokens_per_image", "image_seq_length", "image_seq_len", default=0):
        return min(rows, patches)
    ratio = config.values.get("downsample_ratio")
    if isinstance(ratio, float) and 0 < ratio <= 1:
        return max(1, round(patches * ratio**2))
    return max(1, patches // config.number("scale_factor", "pixel_shuffle_factor", default=1) ** 2)


def _pixel_limits(folder: Path, side: int) -> tuple[int, int]:
    """The pixels that the processor scales to, from its own config, else Qwen3-VL's."""
    upper = side * side or QWEN3_VL_4B_SHAPE.max_pixels
    default = min(QWEN3_VL_4B_SHAPE.min_pixels, upper), upper
    try:
        given = json.loads((folder / "preprocessor_config.json").read_bytes())
    except (OSError, ValueError):
        return default
    given = given if isinstance(given, dict) else {}
    size = size if isinstance(size := given.get("size"), dict) else {}
    low = given.get("min_pixels") or size.get("shortest_edge") or 1
    high = given.get("max_pixels") or size.get("longest_edge") or 0
    if isinstance(low, int) and isinstance(high, int) and high > _PIXELS:
        return min(max(1, low), high), high
    return default
