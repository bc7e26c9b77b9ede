"""Models of published sizes with random weights, made on the device: no checkpoint has to be brought."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from triptych.base.types import JsonObject
from triptych.models.checkpoint.tensors import Checkpoint, Cut

_DEMO = Path(__file__).resolve().parents[2] / "triptych" / "demo"
#: The bundled models, of which a random one has the tokenizer, the processor and the rest of config.json.
_LIKE = {"qwen3_vl": _DEMO / "model", "whisper": _DEMO / "audio" / "model", "bart": _DEMO / "model"}

#: By family: what config.json and preprocessor_config.json of the published model and of a small one have.
_SIZES = tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))
_ARCHITECTURES = {"qwen3_vl": "Qwen3VL", "whisper": "Whisper", "bart": "Bart"}


def write_model(family: str, folder: Path, *, small: bool) -> Path:
    """A checkpoint folder whose file of weights is a header before a hole; `random_weights` fills it."""
    folder.mkdir(parents=True)
    like = _LIKE[family]
    for file in like.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder / file.name)
    sizes = _SIZES[family]["small" if small else "published"]
    architecture = f"{_ARCHITECTURES[family]}ForConditionalGeneration"
    config = {"architectures": [architecture], "model_type": family, "is_encoder_decoder": True}
    if family != "bart":
        config = json.loads((like / "config.json").read_text())
        processor = folder / "preprocessor_config.json"
        own = json.loads(processor.read_text()) | sizes.get("processor", {})
        processor.write_text(json.dumps(own))
    config = _merged(config, sizes["config"])
    (folder / "config.json").write_text(json.dumps(config))
    with no_init_weights(), torch.device("meta"):
        model = getattr(transformers, architecture)(AutoConfig.from_pretrained(folder))
    _write_header(model, folder / "model.safetensors")
    return folder


def _merged(config: JsonObject, sizes: JsonObject) -> JsonObject:
    return config | {
        key: _merged(config[key], value) if isinstance(config.get(key), dict) else value
        for key, value in sizes.items()
    }


def _write_header(model: PreTrainedModel, file: Path) -> None:
    tied = model.all_tied_weights_keys
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        if name not in tied:
            start, end = end, end + 2 * tensor.numel()
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def fill_weights(folder: Path, device: torch.device) -> Path:
    """Puts random weights, made on `device`, into the folder's file, and what vLLM reads beside them."""
    file, generator = folder / "model.safetensors", torch.Generator(device).manual_seed(0)
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        for name, entry in header.items():
            stream.seek(8 + length + entry["data_offsets"][0])
            weight = _random(name, entry["shape"], torch.bfloat16, device, generator)
            stream.write(weight.cpu().contiguous().view(torch.uint8).numpy().data)
    image = json.loads((folder / "preprocessor_config.json").read_text())
    video = {key: value for key, value in image.items() if key != "image_processor_type"}
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": image,
        "video_processor": video | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def _random(
    name: str, shape: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    if len(shape) == 1:
        fill = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        return torch.full(shape, fill, dtype=dtype, device=device)
    # As large as after common initialisations: no activation grows from layer to layer.
    scale = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(scale)


@contextmanager
def random_weights(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the tensors of every checkpoint that is read are random ones of their shapes, on `device`."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(checkpoint: Checkpoint, tensors: Any, name: str, cut: Cut | None) -> torch.Tensor:
        whole = tensors.get_slice(name)
        return _random(name, whole.get_shape(), dtype, device, generator)

    with patch.object(Checkpoint, "_tensor", tensor):
        yield
