"""Defaults of requests and flags, read from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch

from triptych.base.config import WorkerConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device import DEVICES, Device
from triptych.base.machine.start_lock import StartLock
from triptych.models.base import GenerationDefaults
from triptych.models.checkpoint.folder import read_config, read_json

T = TypeVar("T")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KNOWN = frozenset(
    {
        "eos_token_id",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
    }
)


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
    sampled = bool(values.get("do_sample"))
    return GenerationDefaults(
        eos_token_ids=_ids(eos),
        temperature=float(_or(values.get("temperature"), 1.0)) if sampled else 0.0,
        top_p=float(_or(values.get("top_p"), 1.0)) if sampled else 1.0,
        top_k=int(_or(values.get("top_k"), 0)) if sampled else 0,
        min_p=float(_or(values.get("min_p"), 0.0)) if sampled else 0.0,
        repetition_penalty=float(_or(values.get("repetition_penalty"), 1.0)),
        max_tokens=None if (maximum := values.get("max_new_tokens")) is None else int(maximum),
        extra={name: value for name, value in values.items() if name not in _KNOWN},
    )


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


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
