"""The rows of the adapter for all classes are those of vLLM's own encoders, class by class."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from support.data.pictures import picture
from support.vllm_engine.classes import (
    ADAPTED,
    ALWAYS_RESIZED,
    IN_BFLOAT16,
    class_checkpoint,
    processor,
    recipe_of,
)
from support.vllm_engine.server import HOME, ROOT, vllm_environment
from triptych.models.generic.layout import ItemLayout
from triptych.models.registry import load_encoder

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

#: Pictures that no processor resizes, besides the view of the whole that stands last among tiles.
SIZES = {"SmolVLMForConditionalGeneration": ((32, 32), (32, 16))}
VIEW_ROWS = 4
#: Elements have a deviation of about 1. vLLM resizes with torchvision and we with PIL.
ATOL, RESIZED = 2e-5, 1e-2
#: Of classes whose elements have a smaller one.
SMALL = {"Gemma4ForConditionalGeneration": 5e-3}
#: Of towers in bfloat16, whose kernels round differently.
ROUNDED = 0.1


@dataclass
class Encoded:
    """What vLLM's encoders have made of each class's pictures."""

    folder: Path
    log: Path

    def rows(self, architecture: str) -> dict[str, torch.Tensor]:
        file = self.folder / f"{architecture}.safetensors"
        assert file.exists(), self.log.read_text()[-4000:]
        tensors: dict[str, torch.Tensor] = load_file(file)
        return tensors

    def prompts(self, architecture: str) -> dict[str, list[int]]:
        prompts: dict[str, list[int]] = json.loads((self.folder / f"{architecture}.json").read_text())
        return prompts


def files(folder: Path, architecture: str) -> list[Path]:
    made = []
    for number, size in enumerate(SIZES.get(architecture, ((16, 16), (32, 16)))):
        made.append(folder / f"{architecture}-{number}.png")
        picture(70 + number, *size).save(made[-1])
    return made


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    folder = tmp_path_factory.mktemp("classes")
    jobs = [
        {
            "checkpoint": str(class_checkpoint(name, folder / name)),
            "dtype": dtype_of(name),
            "text": f"user: {processor(recipe_of(name)).picture}What is this?",
            "images": [str(file) for file in files(folder, name)],
            "out": str(folder / name),
        }
        for name in ADAPTED
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    result = Encoded(folder, folder / "log")
    program = ROOT / "tests" / "support" / "vllm_engine" / "own_rows.py"
    with result.log.open("wb") as log:
        subprocess.run(
            [str(HOME / "venv" / "bin" / "python"), str(program), str(folder / "jobs.json")],
            env=vllm_environment() | {"PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=850,
            check=True,
        )
    return result


@pytest.mark.parametrize("name", ADAPTED)
def test_our_rows_and_placeholders_are_those_of_vllm(encoded, name):
    theirs, prompts = encoded.rows(name), encoded.prompts(name)
    dtype = getattr(torch, dtype_of(name))
    encoder = load_encoder(encoded.folder / name, device=torch.device("cpu"), dtype=dtype)
    atol, rtol = (ATOL, 1e-4) if dtype == torch.float32 else (ROUNDED, 0.0)
    earlier, resized = None, SMALL.get(name, RESIZED)
    for file in files(encoded.folder, name):
        item = encoder.preprocess(Image.open(file).convert("RGB"), {})
        ours = encoder.encode([item])[0].float()
        exact = len(ours) - VIEW_ROWS if len(ours) > VIEW_ROWS and has_view(name) else len(ours)
        exact = 0 if name in ALWAYS_RESIZED else exact
        torch.testing.assert_close(ours[:exact], theirs[file.name][:exact], atol=atol, rtol=rtol)
        torch.testing.assert_close(ours, theirs[file.name], atol=max(atol, resized), rtol=0)
        assert ours.std(dim=0).mean() > 10 * resized
        if earlier is not None:
            assert (ours[:VIEW_ROWS] - earlier[:VIEW_ROWS]).abs().mean() > 10 * resized
        earlier = ours
        tokens, prompt = list(ItemLayout.decode(item.layout).tokens), prompts[file.name]
        assert any(prompt[at : at + len(tokens)] == tokens for at in range(len(prompt)))


def dtype_of(name: str) -> str:
    """What vLLM computes the class in."""
    return "bfloat16" if name in IN_BFLOAT16 else "float32"


def has_view(name: str) -> bool:
    """Whether a picture of several tiles has a smaller view of the whole, too."""
    return name.startswith(("InternVL", "SmolVLM"))
