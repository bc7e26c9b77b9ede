"""Checkpoint folders of the recipes: built once per state of this code and of transformers, and kept."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils import is_torchvision_available, logging

from support.zoo.models import RECIPES, build_model
from support.zoo.processors import ON_TORCHVISION, PROCESSORS, OwnProcessor, make_tokenizer
from support.zoo.recipe import EOS, PAD, Recipe

_NO_PROCESSOR = OwnProcessor("", "", {})


def own_processor(recipe: Recipe) -> OwnProcessor | None:
    """The recipe's row of the table of processors."""
    if recipe.modality != "image":
        return None
    family = recipe.architecture.removesuffix("ForConditionalGeneration")
    return PROCESSORS.get(family) or (ON_TORCHVISION.get(family) if is_torchvision_available() else None)


def checkpoint(name: str) -> Path:
    """The folder of a recipe's checkpoint, which must not be changed."""
    folder = _cache() / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as aside:
            built = Path(aside) / "checkpoint"
            write_checkpoint(RECIPES[name], built, own_processor(RECIPES[name]))
            try:
                built.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """The whole model, as transformers loads the checkpoint."""
    logging.disable_progress_bar()
    cls = getattr(transformers, RECIPES[name].architecture)
    model: PreTrainedModel = cls.from_pretrained(checkpoint(name), dtype=torch.float32)
    if name.startswith("Llama4"):
        # Its own forward reads it of its decoder's output, which lacks it in transformers 5.24.0.
        MoeCausalLMOutputWithPast.image_outputs = None
    # `generate` fills what a call leaves out from here: nothing ends an answer early.
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD)
    return model.eval()


@functools.cache
def _cache() -> Path:
    key = hashlib.sha256(
        f"{torch.__version__} {transformers.__version__} {is_torchvision_available()}".encode()
    )
    for file in sorted(Path(__file__).parent.glob("*.py")):
        key.update(file.read_bytes())
    return Path(tempfile.gettempdir()) / f"triptych-zoo-{os.getuid()}-{key.hexdigest()[:16]}"


def write_checkpoint(recipe: Recipe, folder: Path, own: OwnProcessor | None) -> None:
    """Writes the model, its tokenizer and its processor, if it has one."""
    build_model(recipe).save_pretrained(folder)
    ends = {"eos_token_id": EOS, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    own = own or _NO_PROCESSOR
    make_tokenizer(own).save_pretrained(folder)
    if not own.processor:
        return
    # By hand, as hubs hold them: a processor without its part for video cannot save itself.
    settings = {"image_processor_type": own.image_processor.removesuffix("Pil"), **own.settings}
    for file, values in (
        ("preprocessor_config.json", {"processor_class": own.processor, **settings}),
        ("processor_config.json", {"processor_class": own.processor, **own.options}),
    ):
        (folder / file).write_text(json.dumps(values, indent=1), encoding="utf-8")
