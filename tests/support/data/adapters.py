"""LoRA adapters as PEFT writes them, and checkpoints that they are merged into."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Layers of the language model that adapters of tests are for.
LANGUAGE = r"^model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight$"
RANK, ALPHA = 4, 8.0


def write_adapter(
    checkpoint: Path,
    folder: Path,
    seed: int,
    *,
    targets: str = LANGUAGE,
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """An adapter of the checkpoint's tensors whose keys match `targets`, strong enough to change answers.

    `config` are further fields of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in _tensors(checkpoint).items():
        if re.search(targets, key):
            rows, columns = tensor.shape
            name = f"base_model.model.{key.removesuffix('.weight')}"
            down = torch.randn(RANK, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, RANK, generator=generator) * scale * tensor.std()
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({key.rsplit(".", 3)[1] for key in tensors})
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """A copy of the checkpoint with the adapter in its weights."""
    shutil.copytree(checkpoint, folder)
    deltas = load_file(adapter / "adapter_model.safetensors")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for key in tensors:
            name = f"base_model.model.{key.removesuffix('.weight')}"
            if (down := deltas.get(f"{name}.lora_A.weight")) is not None:
                up = deltas[f"{name}.lora_B.weight"]
                tensors[key] = tensors[key] + (up @ down * (ALPHA / RANK)).to(tensors[key].dtype)
        save_file(tensors, file, {"format": "pt"})
    return folder


def _tensors(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    return {
        key: tensor for file in checkpoint.glob("*.safetensors") for key, tensor in load_file(file).items()
    }
