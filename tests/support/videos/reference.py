"""What transformers itself makes of videos, with torchvision: a program for an environment that has it.

Imports nothing of Triptych. Reads cases as JSON from a file, writes each one's answer beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig
from transformers.video_utils import load_video


def processor_of(path: Path, named: dict[str, Any]) -> Any:
    """The class's processor, with its parts for pictures (on PIL) and videos (on torchvision)."""
    parts = {
        "image_processor": getattr(transformers, f"{named['image_processor']}Pil").from_pretrained(path),
        "video_processor": getattr(transformers, named["video_processor"]).from_pretrained(path),
        "tokenizer": AutoTokenizer.from_pretrained(path),
    }
    if named["extractor"]:
        kind = named["extractor"].pop("feature_extractor_type")
        parts["feature_extractor"] = getattr(transformers, kind)(**named["extractor"])
    cls = getattr(transformers, named["processor"])
    settings, _ = cls.get_processor_dict(path)
    members = {"check_argument_for_proper_class": lambda *_: object, "__module__": cls.__module__}
    relaxed: Any = type(cls.__name__, (cls,), members)
    return relaxed.from_args_and_dict([parts.get(name) for name in cls.get_attributes()], settings)


@torch.no_grad()
def answer(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """The processor's tensors of a chat with one video, the prompt and the greedy output."""
    path = Path(case["model"])
    processor = processor_of(path, case)
    video, metadata = load_video(
        case["video"],
        backend="pyav",
        sample_indices_fn=lambda metadata, **_: range(metadata.total_num_frames),
    )
    text = processor.tokenizer.apply_chat_template(
        case["messages"], tokenize=False, add_generation_prompt=True
    )
    others: dict[str, Any] = (
        {"images": [Image.open(case["picture"]).convert("RGB")]} if case["picture"] else {}
    )
    if case["sound"]:
        others |= {
            "audio": [np.array(case["sound"], dtype=np.float32)],
            "audio_kwargs": {"sampling_rate": 16_000},
        }
    inputs = processor(
        text=[text],
        **others,
        videos=[video],
        video_metadata=[metadata],
        do_sample_frames=True,
        **case["sampling"],
        return_metadata=True,
        return_tensors="pt",
        add_special_tokens=False,
    )
    inputs.pop("video_metadata", None)
    prompt = inputs["input_ids"][0].tolist()
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=model.generation_config.pad_token_id or 0)
    out = model.generate(**inputs, max_new_tokens=case["tokens"], do_sample=False, eos_token_id=None)
    tensors = {name: value.contiguous() for name, value in inputs.items() if torch.is_tensor(value)}
    return tensors, {"prompt": prompt, "output": out[0, len(prompt) :].tolist()}


def main(file: Path) -> None:
    torch.set_num_threads(1)
    answers: list[dict[str, Any]] = []
    for number, case in enumerate(json.loads(file.read_text())):
        try:
            tensors, tokens = answer(case)
        except Exception as error:  # of any kind: code of the class
            answers.append({"prompt": [], "output": [], "error": f"{type(error).__name__} {error}"})
            continue
        save_file(tensors, file.with_name(f"{number}.safetensors"))
        answers.append({**tokens, "error": ""})
    file.with_name("answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
