"""Models of published sizes with random weights, made on the device: no checkpoint has to be brought."""

from __future__ import annotations

import json
import math
import shutil
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
from triptych.models.checkpoint.folder import Checkpoint, Cut

_DEMO = Path(__file__).resolve().parents[2] / "triptych" / "demo"
#: The bundled models, of which a random one has the tokenizer, the processor and the rest of config.json.
_LIKE = {"qwen3_vl": _DEMO / "model", "whisper": _DEMO / "audio" / "model", "bart": _DEMO / "model"}

#: Qwen3-VL-8B, Whisper large-v3 and BART large: what their config.json has.
SIZES: dict[str, JsonObject] = {
    "qwen3_vl": {
        "tie_word_embeddings": False,
        "text_config": {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262144, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "out_hidden_size": 4096, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "whisper": {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
        "num_mel_bins": 128, "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51866,
    },
    "bart": {
        "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
        "max_position_embeddings": 1024, "vocab_size": 50265,
    },
}  # fmt: skip
#: For a rehearsal: the bundled models' own sizes, and a BART as small.
SMALL_SIZES: dict[str, JsonObject] = {
    "qwen3_vl": {},
    "whisper": {"max_target_positions": 64},
    "bart": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "max_position_embeddings": 128, "vocab_size": 704,
    },
}  # fmt: skip
_PICTURES: JsonObject = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
_WINDOWS: JsonObject = {
    "feature_size": 128, "chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000
}  # fmt: skip
_ARCHITECTURES = {"qwen3_vl": "Qwen3VL", "whisper": "Whisper", "bart": "Bart"}


def write_model(family: str, folder: Path, *, small: bool) -> Path:
    """A checkpoint folder whose file of weights is a header before a hole; `random_weights` fills it."""
    folder.mkdir(parents=True)
    like = _LIKE[family]
    for file in like.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder / file.name)
    architecture = f"{_ARCHITECTURES[family]}ForConditionalGeneration"
    config = {"architectures": [architecture], "model_type": family, "is_encoder_decoder": True}
    config |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    if family != "bart":
        config = json.loads((like / "config.json").read_text())
        processor = folder / "preprocessor_config.json"
        own = _PICTURES if family == "qwen3_vl" else {} if small else _WINDOWS
        processor.write_text(json.dumps(json.loads(processor.read_text()) | own))
    config = _merged(config, (SMALL_SIZES if small else SIZES)[family])
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


@contextmanager
def random_weights(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the tensors of every checkpoint that is read are random ones of their shapes, on `device`."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(checkpoint: Checkpoint, tensors: Any, name: str, cut: Cut | None) -> torch.Tensor:
        whole = tensors.get_slice(name)
        shape = whole.get_shape()
        if len(shape) == 1:
            fill = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            return torch.full(shape, fill, dtype=dtype, device=device)
        # As large as after common initialisations: no activation grows from layer to layer.
        scale = 1 / math.sqrt(math.prod(shape[1:]))
        return torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(scale)

    with patch.object(Checkpoint, "_tensor", tensor):
        yield
