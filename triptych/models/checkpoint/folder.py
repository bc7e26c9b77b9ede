"""A checkpoint folder: its JSON files, and which safetensors it has. Nothing here unpickles."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych.models.checkpoint.architectures import check_architecture
from triptych.models.checkpoint.support import check_supported, required_by_checkpoint

_REMEDY = "give MODEL=/folder with config.json and *.safetensors"
_INDEX = "model.safetensors.index.json"


def read_config(path: Path) -> JsonObject:
    """config.json of a checkpoint folder; ConfigError with the remedy if there is none."""
    if not str(path) or not path.is_dir():
        what = (
            (_foreign([path.name]) or f"is a file: {_REMEDY}")
            if path.is_file()
            else f"does not exist: {_REMEDY}"
        )
        raise ConfigError(f"MODEL={path} {what}")
    config = read_json(path / "config.json")
    names = {file.name for file in path.iterdir()}
    if config is None:
        raise ConfigError(f"MODEL={path} {_foreign(names) or f'has no config.json: {_REMEDY}'}")
    check_supported(path, required_by_checkpoint(config, names))
    if isinstance(named := config.get("architectures"), list):
        config["architectures"] = own_names(named)
    return config


#: Names that checkpoints on hubs give to classes of transformers: by the code of their own, and vLLM.
_HUB_NAMES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}


def own_names(architectures: Iterable[object]) -> list[str]:
    """The architectures as transformers calls them."""
    return [_HUB_NAMES.get(name, name) for name in map(str, architectures)]


def _foreign(names: Iterable[str]) -> str:
    """What a folder without config.json is, and where it is served; empty for none that is known."""
    for name in names:
        if name == "adapter_config.json":
            return (
                "is a LoRA adapter: merge it into its checkpoint (peft: merge_and_unload) and give that, or "
                "give the checkpoint, and the adapter by --lora-modules with --engine vllm"
            )
        if name.endswith(".gguf"):
            return f"holds {name}, which llama.cpp serves: {_REMEDY}"
    return ""


def read_json(file: Path) -> JsonObject | None:
    """A JSON object, or None where there is no such file; ConfigError if it is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a JSON object: fetch the checkpoint again")
    return value


def check_folder(path: Path, *, weights: bool = True, texts: bool = True) -> None:
    """ConfigError for a folder that cannot be served, as far as its JSON files, headers and names tell.

    `weights`: whether this process loads any; `texts`: whether it makes tokens.
    """
    check_architecture(path, read_config(path))
    if weights:
        tensor_files(path)
    if texts:
        check_vocabulary(path)


#: The files that the settings of a processor of pictures may be in.
SETTINGS_FILES = ("processor_config.json", "preprocessor_config.json")


def check_image_processor(path: Path) -> None:
    """ConfigError where config.json has a part for pictures, and nothing here prepares each alone."""
    if "vision_config" in read_config(path) and not any((path / name).is_file() for name in SETTINGS_FILES):
        raise no_image_processor(path)
    if any((read_json(path / name) or {}).get("use_image_id") is True for name in SETTINGS_FILES):
        raise rewrites_prompt(path, numbers=True)


def rewrites_prompt(path: Path, *, numbers: bool) -> ConfigError:
    """Of a processor whose tokens for a picture depend on what is beside it, like its number."""
    remedy = "set use_image_id to false in preprocessor_config.json" if numbers else "it cannot be served"
    return ConfigError(f"MODEL={path}: its processor rewrites the prompt around pictures: {remedy}")


def no_image_processor(path: Path) -> ConfigError:
    """Says which file of the folder is missing."""
    return ConfigError(
        f"MODEL={path} has no image processor: give MODEL=/folder with preprocessor_config.json"
    )


#: The files that a tokenizer's vocabulary may be in.
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.spm", "*.tiktoken", "tekken.json")


def check_vocabulary(path: Path) -> None:
    """ConfigError where the folder has no tokenizer: transformers makes an empty one then."""
    if not any(True for pattern in _VOCABULARIES for _ in path.glob(pattern)):
        raise ConfigError(f"MODEL={path} has no tokenizer: put its tokenizer.json into the folder")


def given_template(file: str) -> str:
    """The source in the file of --chat-template, empty without one; ConfigError where it cannot be read."""
    if not file:
        return ""
    try:
        source = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from error
    if not source.strip():
        raise ConfigError(f"--chat-template {file} is empty: give a Jinja template, or leave it out")
    return source


def safetensors_files(path: Path) -> list[Path]:
    """The files that hold the tensors, sorted; ConfigError if there are none or the index names others."""
    index = read_json(path / _INDEX)
    if index is not None:
        files = sorted({path / name for name in index.get("weight_map", {}).values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ConfigError(
                f"MODEL={path} lacks {absent[0]}, which its index names: fetch the checkpoint again"
            )
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = next((file.name for file in path.glob("*.bin")), "")
        why = f"only {pickled}, and pickles are never loaded" if pickled else "no weights"
        raise ConfigError(f"MODEL={path} has {why}: {_REMEDY}")
    return files


def tensor_files(path: Path) -> dict[str, Path]:
    """The file of every tensor, by key; ConfigError for damaged ones."""
    file_of_tensor: dict[str, Path] = {}
    for file in safetensors_files(path):
        with open_tensors(file) as tensors:
            file_of_tensor.update((key, file) for key in tensors.keys())  # noqa: SIM118 - not a mapping
    return file_of_tensor


def open_tensors(file: Path) -> safe_open:
    """A file of tensors, mapped; ConfigError for a damaged one."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged ({error}): fetch the checkpoint again") from error
