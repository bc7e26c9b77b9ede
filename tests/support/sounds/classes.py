"""Classes that take sounds: checkpoints with feature extractors, and what transformers answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from support.zoo.checkpoint import write_checkpoint
from support.zoo.models import RECIPES
from support.zoo.processors import OwnProcessor, make_tokenizer, without_video
from support.zoo.recipe import AUDIO, Recipe

TEXT = "What is heard?"
_BETWEEN = "<|vision_start|><image><|vision_end|>"
_PICTURES = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1024},
}  # fmt: skip
_VIDEOS = {**_PICTURES, "size": {"shortest_edge": 256, "longest_edge": 8192}, "cap_pixels_per_frame": False}


@dataclass(frozen=True)
class SoundClass:
    """A recipe of which `audio` is changed; `window` are the seconds that its extractor pads to."""

    family: str
    processor: str
    audio: Mapping[str, Any] = field(default_factory=dict)
    window: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Sounds in a prompt, at most.
    sounds: int = 2
    sees: bool = False
    videos: str = "Qwen2VLVideoProcessor"
    #: What the chat template writes for a picture.
    picture: str = _BETWEEN
    #: Of its weights.
    seed: str = "a"
    extractor_type: str = "WhisperFeatureExtractor"
    #: Of the recipe.
    variation: str = ""
    images: str = "Qwen2VLImageProcessor"
    pictures: Mapping[str, Any] = field(default_factory=lambda: _PICTURES)
    clips: Mapping[str, Any] = field(default_factory=lambda: _VIDEOS)
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"fps": 2.0, "size": _VIDEOS["size"]})

    @property
    def name(self) -> str:
        return f"{self.family}ForConditionalGeneration"

    @property
    def extractor(self) -> dict[str, Any]:
        if self.family == "Gemma4":
            return {"feature_size": 32}
        return {"feature_size": 16, "chunk_length": self.window, "return_attention_mask": True}

    def own(self) -> OwnProcessor:
        return OwnProcessor(self.processor, f"{self.images}Pil", {}, picture=self.picture)

    def checkpoint(self, folder: Path, change: Callable[[Recipe], Recipe] | None = None) -> Path:
        """Its folder, with the settings of its extractor (and pictures) in one file, as hubs hold them."""
        recipe = RECIPES[self.name + self.variation]
        recipe = recipe if change is None else change(recipe)
        audio = {**(recipe.config.get("audio_config") or {}), **self.audio}
        path = folder / self.family
        config = {**recipe.config, "audio_config": audio}
        write_checkpoint(replace(recipe, config=config, variation=self.seed), path, None)
        make_tokenizer(self.own()).save_pretrained(path)
        pictures = {"image_processor_type": self.images, **self.pictures} if self.sees else {}
        if self.sees:
            videos = {"video_processor_type": self.videos, **self.clips}
            (path / "video_preprocessor_config.json").write_text(json.dumps(videos))
        settings = {"feature_extractor_type": self.extractor_type, **self.extractor, **pictures}
        for file, values in (("preprocessor_config.json", settings), ("processor_config.json", self.options)):
            (path / file).write_text(json.dumps({"processor_class": self.processor, **values}))
        return path

    def made(self, path: Path) -> Any:
        """transformers' processor, without its part for videos."""
        parts = {
            "feature_extractor": getattr(transformers, self.extractor_type)(**self.extractor),
            "tokenizer": transformers.AutoTokenizer.from_pretrained(path),
            **self.options,
        }
        if self.sees:
            parts |= {"image_processor": getattr(transformers, f"{self.images}Pil")(**self.pictures)}
            parts |= {"video_processor": None, "chat_template": parts["tokenizer"].chat_template}
        with without_video():
            return getattr(transformers, self.processor)(**parts)


_GLM = {"audio_token": "<|audio|>", "max_audio_len": 10}
SOUNDS = (
    SoundClass("Qwen2Audio", "Qwen2AudioProcessor", {"max_source_positions": 50}),
    SoundClass("Voxtral", "VoxtralProcessor", {"max_source_positions": 1500}, 30, sounds=1, seed="j"),
    SoundClass(
        "Qwen3ASR",
        "Qwen3ASRProcessor",
        {"max_source_positions": 500},
        10,
        sounds=1,
        extractor_type="Qwen3ASRFeatureExtractor",
    ),
    SoundClass("GlmAsr", "GlmAsrProcessor", window=2, options=_GLM, sounds=1),
    SoundClass("Qwen2_5OmniThinker", "Qwen2_5OmniProcessor", window=3, sees=True),
    SoundClass(
        "Qwen3OmniMoeThinker",
        "Qwen3OmniMoeProcessor",
        {"n_window": 50, "n_window_infer": 100, "conv_chunksize": 500, "max_source_positions": 50},
        3,
        sees=True,
    ),
    SoundClass(
        "Gemma4",
        "Gemma4Processor",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "output_proj_dims": 32,
            "subsampling_conv_channels": [32, 8],
        },
        30,
        sees=True,
        videos="Gemma4VideoProcessor",
        extractor_type="Gemma4AudioFeatureExtractor",
        variation="-per-layer-inputs",
        images="Gemma4ImageProcessor",
        picture="<image>",
        pictures={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        clips={"patch_size": 4, "pooling_kernel_size": 2},
        sampling={"num_frames": 4},
    ),
)


def messages(sounds: int, picture: bool) -> list[dict[str, Any]]:
    content = [*({"type": "audio"} for _ in range(sounds)), *([{"type": "image"}] if picture else ())]
    return [{"role": "user", "content": [*content, {"type": "text", "text": TEXT}]}]


@torch.no_grad()
def reference(
    entry: SoundClass, path: Path, sounds: Sequence[np.ndarray], picture: Image.Image | None, count: int
) -> tuple[list[int], list[int]]:
    """The prompt's ids and the greedy answer, by transformers' processor and `generate`."""
    processor = entry.made(path)
    asked = messages(len(sounds), picture is not None)
    text = processor.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    if entry.family == "Voxtral":
        inputs = _voxtral(processor, text, sounds)
    else:
        given = {"images": [picture]} if picture is not None else {}
        rate = {"sampling_rate": 16_000}
        inputs = processor(text=[text], audio=list(sounds), audio_kwargs=rate, return_tensors="pt", **given)
    cls = getattr(transformers, entry.name)
    model = cls.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
    out = model.generate(**tensors, max_new_tokens=count, do_sample=False, eos_token_id=None)
    prompt = tensors["input_ids"][0].tolist()
    return prompt, out[0, len(prompt) :].tolist()


def _voxtral(processor: Any, text: str, sounds: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Its processor expands placeholders by mistral-common alone: 375 tokens for each half minute."""
    given = processor._merge_kwargs()["audio_kwargs"]
    length = given.pop("max_source_positions")
    features = processor._retrieve_input_features(list(sounds), length, **given)
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    expanded = [token for each in ids for token in [each] * (375 * len(features) if each == AUDIO else 1)]
    return {"input_ids": torch.tensor([expanded]), "input_features": features}
