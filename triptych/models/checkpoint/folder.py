"""A checkpoint folder: its JSON files and its safetensors, one file or many. Nothing here unpickles."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError, safe_open

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych.models.checkpoint.support import check_supported, required_by_checkpoint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices `first` to `last` of dimension `dim`, which has `whole` in the file."""

    dim: int
    first: int
    last: int
    whole: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this part of the whole tensor."""
        return tensor.narrow(self.dim, self.first, self.last - self.first)

    def fits(self, shape: list[int]) -> bool:
        """Whether a tensor of this shape is the one that the cut was made for."""
        return self.dim < len(shape) and shape[self.dim] == self.whole


_REMEDY = "give MODEL=/folder with config.json and *.safetensors"
_INDEX = "model.safetensors.index.json"
#: Of an element, by safetensors' names of dtypes; the others have one byte.
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
_ITEM_BYTES |= {"BF16": 2, "F16": 2, "I16": 2, "U16": 2}

#: Read pages count as this process's memory while they are mapped. A file is mapped anew after so many, or
#: the weights would be in memory twice at the end of loading: as pages of the file and as their copies.
MAPPED_BYTES = 64 << 20


class Checkpoint:
    """An open checkpoint: `config` is config.json, `files` maps every tensor's key to the file with it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.files = _tensor_files(self.path)

    def read(
        self, keys: Iterable[str], cuts: Mapping[str, Cut] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of `keys`, file by file, as mapped memory: copy what shall outlive the files.

        Of a key in `cuts` only that part is read; ConfigError for a tensor that it was not made for.
        """
        for file, names in self._by_file(keys).items():
            tensors, read = _open(file), 0
            for name in names:
                if read >= MAPPED_BYTES:
                    tensors, read = _open(file), 0
                tensor = self._tensor(tensors, name, (cuts or {}).get(name))
                read += tensor.nbytes
                yield name, tensor

    def nbytes(self, keys: Iterable[str], cuts: Mapping[str, Cut] | None = None) -> int:
        """Bytes that `read` of the same reads, by the files' headers."""
        total = 0
        for file, names in self._by_file(keys).items():
            with _open(file) as tensors:
                for name in names:
                    whole = tensors.get_slice(name)
                    size = math.prod(whole.get_shape()) * _ITEM_BYTES.get(whole.get_dtype(), 1)
                    cut = (cuts or {}).get(name)
                    total += size if cut is None else size * (cut.last - cut.first) // cut.whole
        return total

    def _by_file(self, keys: Iterable[str]) -> dict[Path, list[str]]:
        tensors_by_file: dict[Path, list[str]] = {}
        for key in keys:
            tensors_by_file.setdefault(self.files[key], []).append(key)
        return tensors_by_file

    def _tensor(self, tensors: safe_open, name: str, cut: Cut | None) -> torch.Tensor:
        if cut is None:
            return cast("torch.Tensor", tensors.get_tensor(name))  # type: ignore[no-untyped-call]
        whole = tensors.get_slice(name)  # type: ignore[no-untyped-call]
        shape = whole.get_shape()
        if not cut.fits(shape):
            raise ConfigError(
                f"MODEL={self.path}: its tensors do not fit its config.json: {name} is {shape}, where "
                f"dimension {cut.dim} should be {cut.whole}: fetch the checkpoint again"
            )
        span = slice(cut.first, cut.last)
        part: torch.Tensor = whole[span] if cut.dim == 0 else whole[:, span]
        return part


def read_config(path: Path) -> JsonObject:
    """config.json of a checkpoint folder; ConfigError with the remedy if there is none."""
    if not str(path) or not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise ConfigError(f"MODEL={path} {what}: {_REMEDY}")
    config = read_json(path / "config.json")
    names = {file.name for file in path.iterdir()}
    if config is None:
        raise ConfigError(f"MODEL={path} {_foreign(names) or f'has no config.json: {_REMEDY}'}")
    check_supported(path, required_by_checkpoint(config, names))
    return config


def _foreign(names: Iterable[str]) -> str:
    """What a folder without config.json is, and where it is served; empty for none that is known."""
    for name in names:
        if name == "adapter_config.json":
            return "is a LoRA adapter: merge it into its checkpoint (peft: merge_and_unload) and give that"
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


def check_folder(path: Path) -> None:
    """ConfigError for a folder that lacks weights or tokenizer, or whose files are cut, by their headers."""
    _tensor_files(path)
    check_vocabulary(path)


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


def _tensor_files(path: Path) -> dict[str, Path]:
    file_of_tensor: dict[str, Path] = {}
    for file in safetensors_files(path):
        with _open(file) as tensors:
            file_of_tensor.update((key, file) for key in tensors.keys())  # noqa: SIM118 - not a mapping
    return file_of_tensor


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged ({error}): fetch the checkpoint again") from error
