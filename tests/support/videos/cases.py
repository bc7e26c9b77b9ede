"""Chats about a video: transformers' answers by the torchvision environment, and the engine's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from support.engine.engine_cell import EngineCell
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.pd_worker.frontend.prompt import Prompt, open_checkpoint

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".tools" / "torchvision" / "venv" / "bin" / "python"
TOKENS = 16


@dataclass
class Sides:
    """Both sides of a checkpoint."""

    path: Path
    encoder: EncoderSide
    decoder: DecoderSide


@dataclass(frozen=True)
class VideoCase:
    """One chat about one clip. `sampling` are arguments of the processor's call.

    `options` are the request's for the same frames; the names are those of transformers' classes.
    """

    model: Path
    clip: bytes
    processor: str
    image_processor: str
    video_processor: str
    sampling: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    #: With a picture before the clip, and a sound before both.
    picture: Image.Image | None = None
    sound: np.ndarray | None = None
    extractor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        items = [{"type": "audio"}] * (self.sound is not None)
        items += [{"type": "image"}] * (self.picture is not None) + [{"type": "video"}]
        content = [*items, {"type": "text", "text": "What happens?"}]
        return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class VideoAnswer:
    """What transformers makes of a case; `error` says why it makes nothing."""

    tensors: dict[str, torch.Tensor]
    prompt: list[int]
    output: list[int]
    error: str = ""


def reference(cases: Sequence[VideoCase], folder: Path) -> list[VideoAnswer]:
    """The answers of transformers' processors on torchvision and of `generate`, in fp32."""
    if not PYTHON.exists():
        raise FileNotFoundError(f"{PYTHON} is missing: use `make test-slow`, or tests/tools/torchvision.sh")
    described = []
    for number, case in enumerate(cases):
        file = folder / f"{number}.clip"
        file.write_bytes(case.clip)
        names = ("processor", "image_processor", "video_processor")
        described.append(
            {
                **{name: getattr(case, name) for name in names},
                "model": str(case.model),
                "video": str(file),
                "messages": case.messages,
                "picture": _saved(case.picture, file.with_suffix(".png")),
                "sound": None if case.sound is None else case.sound.tolist(),
                "extractor": dict(case.extractor),
                "sampling": dict(case.sampling),
                "tokens": TOKENS,
            }
        )
    (folder / "cases.json").write_text(json.dumps(described))
    program = Path(__file__).with_name("reference.py")
    subprocess.run(
        [PYTHON, program, folder / "cases.json"], check=True, capture_output=True, cwd=ROOT, timeout=500
    )
    answers = json.loads((folder / "answers.json").read_text())
    return [
        VideoAnswer(load_file(folder / f"{number}.safetensors") if not answer["error"] else {}, **answer)
        for number, answer in enumerate(answers)
    ]


def _saved(picture: Image.Image | None, file: Path) -> str:
    if picture is None:
        return ""
    picture.save(file)
    return str(file)


def prepared(case: VideoCase, encoder: EncoderSide) -> PreparedItem:
    """The clip as an encoder worker prepares it."""
    with MediaClip(case.clip, VideoLimits()) as clip:
        return encoder.preprocess_video(clip, case.options)


def plan_of(item: PreparedItem, width: int, number: int = 0) -> ItemPlan:
    return ItemPlan(
        f"{number:064x}", "n" * 64, item.modality or "image", item.rows, width, "float32",
        item.length, item.runs, item.grid_thw, item.layout,
    )  # fmt: skip


def built(case: VideoCase, decoder: DecoderSide, *plans: ItemPlan) -> Prompt:
    """The prompt as a PD worker builds it."""
    builder, _ = open_checkpoint(case.model, decoder, 4096)
    return builder.build(json.dumps(case.messages).encode(), plans)


def answered(
    cell: EngineCell, decoder: DecoderSide, prompt: Prompt, rows: Sequence[torch.Tensor], count: int = TOKENS
) -> list[int]:
    """The greedy output of an engine that holds these rows."""
    for feature, data in zip(prompt.features, rows, strict=True):
        cell.store[feature.mm_hash] = EncoderOutput(feature.plan, data)
    given = decoder.prompt_inputs(prompt.token_ids, prompt.features)
    request = cell.build(
        prompt.token_ids, prompt.features, count, given.positions, given.delta,
        both_ways=given.spans, inputs=given.inputs,
    )  # fmt: skip
    (output,) = cell.finish([request])
    return output
