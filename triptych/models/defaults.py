"""Defaults of requests and flags, read from the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from triptych.base.config import WorkerConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device import DEVICES, Device
from triptych.base.machine.start_lock import StartLock
from triptych.base.types import DEFAULTED, DRAWING, GREEDY, JsonObject, SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.models.checkpoint.folder import read_config, read_json

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KNOWN = frozenset({"eos_token_id", "do_sample", "max_new_tokens", *DEFAULTED})


def generation_defaults(path: Path) -> GenerationDefaults:
    """generation_config.json, else config.json's eos. Without `do_sample` the checkpoint is greedy.

    Only the file counts: transformers' own defaults, such as top_k 50, are not the model's. ConfigError for
    a value of another kind.
    """
    try:
        return _generation_defaults(Path(path))
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(
            f"MODEL={path}: generation_config.json or config.json has a wrong value: {error}"
        ) from error


def _generation_defaults(path: Path) -> GenerationDefaults:
    values = read_json(path / "generation_config.json") or {}
    eos = values.get("eos_token_id")
    if eos is None:
        config = read_config(path)
        eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return GenerationDefaults(
        eos_token_ids=_ids(eos),
        sampling=_sampling(values),
        max_tokens=None if (maximum := values.get("max_new_tokens")) is None else int(maximum),
        extra={name: value for name, value in values.items() if name not in _KNOWN},
    )


def _sampling(values: JsonObject) -> SamplingParams:
    """GREEDY with what the checkpoint gives; of what counts where tokens are drawn, only with `do_sample`."""
    sampled = bool(values.get("do_sample"))
    given: dict[str, Any] = {"temperature": 1.0} if sampled else {}
    for name in DEFAULTED:
        value = values.get(name)
        if value is not None and (sampled or name not in DRAWING):
            given[name] = type(getattr(GREEDY, name))(value)
    return replace(GREEDY, **given)


def resolve_device(name: str) -> torch.device:
    """The device of --device, opened; ConfigError for one that is not served, or CUDA where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is unknown: use cpu, cuda or cuda:N") from error
    if device.type not in DEVICES:
        raise ConfigError(f"--device {name} is not served: use cpu, cuda or cuda:N")
    if not DEVICES[device.type].available():
        raise ConfigError(f"--device {name}: this torch finds no {device.type} device; use --device cpu")
    opened = Device.of(device)
    opened.open()
    return opened.torch


def start_lock(config: WorkerConfig) -> StartLock:
    """The lock of this worker's start, acquired: till its release no other measures the device's memory."""
    alone = not config.device_memory
    return StartLock(Device.of(resolve_device(config.device)).start_name if alone else "").acquire()


def resolve_dtype(path: Path, device: torch.device | str, name: str = "auto") -> torch.dtype:
    """The torch dtype of a flag's value; `auto` is the checkpoint's on CUDA and float32 on a CPU."""
    if name != "auto":
        return _dtype(name, f"--dtype {name}")
    if torch.device(device).type == "cpu":
        return torch.float32
    config = read_config(Path(path))
    text = config.get("text_config") or {}
    dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return _dtype(dtype or "bfloat16", f"the dtype of MODEL={path}, {dtype},")


def _dtype(name: str, what: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"{what} is not supported: give --dtype {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, list) else (int(value),)
