"""The model's folder, and the devices that workers are to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych.config import ServeConfig, format_size
from triptych.doctor.finding import CheckResult, fail, note, ok
from triptych.errors import ConfigError
from triptych.launch.model_path import resolve_demo, resolve_model


def check_model(config: ServeConfig) -> list[CheckResult]:
    """Whether the folder holds a checkpoint that can be served; a hub id is not looked up."""
    try:
        given = resolve_demo(config.demo, config.model)
        if given and not Path(given).expanduser().exists() and not given.startswith(("/", ".", "~")):
            return [note("model", f"{given} is a hub id: not looked up", "name a folder to have it checked")]
        path = resolve_model(given)
    except ConfigError as error:
        found, _, remedy = str(error).partition(": ")
        return [fail("model", found, remedy or "name a checkpoint folder")]
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if not weights:
        return [fail("model", f"{path} has no *.safetensors", "download it again, with its weights")]
    return [_family(path, weights)]


def _family(path: Path, weights: int) -> CheckResult:
    shown = f"{path}, {format_size(weights)} of weights"
    try:
        from triptych.models.registry import family_of
    except ImportError:
        return note("model", shown, "torch and transformers are not installed: its family is not known here")
    try:
        return ok("model", f"{shown}, family {family_of(path).name}")
    except ConfigError as error:
        return fail("model", shown, str(error))


def check_devices(wanted: Sequence[str]) -> list[CheckResult]:
    """Each device that a worker is to use, by what torch sees."""
    try:
        import torch
    except ImportError:
        return [note("device", "torch is not installed: this machine can run a proxy, and no worker")]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"{torch.cuda.get_device_name(index)}" for index in range(gpus)]
    return [device_finding(device, names) for device in dict.fromkeys(wanted)]


def device_finding(device: str, gpus: Sequence[str]) -> CheckResult:
    """One device, like "cpu" or "cuda:1", where these GPUs are."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ok("device", "cpu" + (f"; {len(gpus)} GPUs are not used" if gpus else ""))
    if kind == "cuda" and (not index or (index.isdecimal() and int(index) < len(gpus))) and gpus:
        return ok("device", f"{device}: {gpus[int(index or 0)]}, {len(gpus)} in all")
    if kind == "cuda":
        remedy = "see `nvidia-smi`, the pod's GPU limit, and whether torch is built for CUDA"
        return fail("device", f"{device}: {len(gpus)} GPUs are seen", remedy)
    return fail("device", f"{device} is unknown", "--device cpu, cuda or cuda:N")
