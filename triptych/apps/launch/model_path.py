"""Resolves a model argument (a folder or a hub id) to a folder on disk."""

from __future__ import annotations

import re
from pathlib import Path

from triptych.base.errors import ConfigError
from triptych.base.parent import set_variable

_DEMO = Path(__file__).resolve().parents[2] / "demo"
DEMO_MODEL = _DEMO / "model"
AUDIO_DEMO_MODEL = _DEMO / "audio" / "model"
#: The bundled models by what `triptych serve --demo` calls them.
DEMOS = {"images": DEMO_MODEL, "audio": AUDIO_DEMO_MODEL}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(model: str) -> Path:
    """The checkpoint folder of `model`: a folder, a hub id, or "" for the demo model; else ConfigError.

    What a path holds, a folder or a file, `check_folder` says.
    """
    if not model:
        return DEMO_MODEL
    path = Path(model).expanduser()
    if path.exists():
        return path.resolve()
    if path.is_absolute() or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"MODEL={model} does not exist: give a checkpoint folder, MODEL=/folder")
    return _from_hub(model)


def is_hub_id(model: str) -> bool:
    """Whether `resolve_model` would fetch it."""
    return bool(_HUB_ID.fullmatch(model)) and not model.startswith(".") and not Path(model).exists()


def resolve_demo(demo: str | None, model: str) -> str:
    """What `serve` shall take for MODEL; ConfigError where both a demo and a model are named."""
    if demo and model:
        raise ConfigError(f"--demo {demo} goes without MODEL={model}: leave one of them out")
    return str(DEMOS[demo]) if demo else model


def model_name(path: Path) -> str:
    """The name that clients use when none is given: the folder's."""
    return {DEMO_MODEL: "demo", AUDIO_DEMO_MODEL: "demo-audio"}.get(path, path.name)


def _from_hub(model: str) -> Path:
    set_variable("HF_HUB_ETAG_TIMEOUT", "5")
    set_variable("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError("hub ids need the worker extra: pip install 'triptych[worker]'") from error
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises dozens of kinds; each means: no files here
        raise ConfigError(
            f"the hub cannot be reached or does not have {model!r} ({type(error).__name__}): "
            "fetch the checkpoint elsewhere and give its folder, MODEL=/folder"
        ) from error
