"""Checkpoints that lack something: one line with the remedy, before anything is served."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.zoo.checkpoint import checkpoint
from triptych.base.errors import ConfigError
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.parallel.tensor_parallel import TensorParallel

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("LlavaNextForConditionalGeneration"), path)
    return path


def without(folder: Path, part: str) -> str:
    """Takes the first tensor with `part` in its name out of the checkpoint; its name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if part in name)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def test_a_tensor_that_is_missing_is_named_by_the_side_that_needs_it(folder: Path) -> None:
    without(folder, "layers.1.mlp")
    with pytest.raises(ConfigError, match=r"lacks tensors: .*layers\.1\.mlp.*fetch the checkpoint again"):
        GenericDecoder.load(folder, **CPU, attn_implementation="sdpa")
    assert not any(p.is_meta for p in GenericEncoder.without_processor(folder, **CPU).module.parameters())


def test_the_other_sides_tensors_are_not_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")  # does not propagate
    logger.addHandler(caplog.handler)
    try:
        GenericDecoder.load(folder, **CPU, attn_implementation="sdpa")
    finally:
        logger.removeHandler(caplog.handler)
    assert "UNEXPECTED" not in caplog.text


def test_a_folder_without_a_processor_says_so(folder: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="processor"):
        GenericEncoder.load(folder, **CPU)
    with pytest.raises(ConfigError, match=r"give MODEL=/folder with preprocessor_config.json"):
        GenericEncoder.processor_config(folder)


def test_sizes_that_fit_no_tensor_are_one_line(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 80
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="fit its config.json|misshapen"):
        GenericDecoder.load(folder, **CPU, attn_implementation="sdpa")


def test_ranks_that_do_not_divide_the_heads_and_quantization_are_refused_by_name(folder: Path) -> None:
    options = {**CPU, "attn_implementation": "sdpa"}
    with pytest.raises(ConfigError, match="--tensor-parallel one of 1, 2, 4"):
        GenericDecoder.load(folder, **options, parallel=TensorParallel(0, 3))
    with pytest.raises(ConfigError, match="--quantization"):
        GenericDecoder.load(folder, **options, quantize=True)
    with pytest.raises(ConfigError, match="--quantization"):
        GenericEncoder.load(folder, **CPU, quantize=True)
