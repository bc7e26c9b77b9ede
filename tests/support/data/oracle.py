"""What transformers itself answers: the reference of "exact". Imports nothing of Triptych."""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.utils import logging

#: A first difference is admitted below this margin between the reference's two best logits.
TIE_MARGIN = 1e-4
MIN_DISTINCT = 20

Message = Mapping[str, Any]


@dataclass(frozen=True)
class OracleResult:
    """Greedy output of one prompt. Per step: the margin of the best logit over the second, and the second."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    margins: list[float]
    runners_up: list[int]


@dataclass(frozen=True)
class _Checkpoint:
    model: Any
    tokenizer: Any
    processor: Any
    image_token_id: int
    merge_size: int
    eos_token_id: int | list[int] | None


@functools.lru_cache(maxsize=6)
def _open(path: Path, dtype: torch.dtype = torch.float32) -> _Checkpoint:
    logging.disable_progress_bar()
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    config = model.config
    image_token_id = getattr(config, "image_token_id", None)
    defaults = model.generation_config
    eos = defaults.eos_token_id
    # `generate` fills what a call leaves out from here: nothing but the call may decide.
    model.generation_config = GenerationConfig(pad_token_id=defaults.pad_token_id or 0)
    return _Checkpoint(
        model=model.eval(),
        tokenizer=AutoTokenizer.from_pretrained(path),
        processor=image_processor(path),
        image_token_id=config.image_token_index if image_token_id is None else image_token_id,
        merge_size=getattr(config.vision_config, "spatial_merge_size", 1),
        eos_token_id=eos,
    )


def kept(question: Iterable[bytes], answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer that was given to the question before, with these libraries on such a CPU, or `answer()`.

    `question` has all that decides the answer, the code that asks it included.
    """
    key = hashlib.sha256()
    machine = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability())
    for part in (*(word.encode() for word in machine), *question):
        key.update(len(part).to_bytes(8, "little") + part)
    file = Path(tempfile.gettempdir()) / f"triptych-answers-{os.getuid()}" / key.hexdigest()
    if file.exists():
        known: dict[str, Any] = json.loads(file.read_text())
        return known
    found = answer()
    file.parent.mkdir(exist_ok=True)
    # Concurrent runs never see half an answer.
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
        json.dump(found, scratch)
    Path(scratch.name).replace(file)
    return found


@functools.cache
def digest(folder: Path) -> bytes:
    """That of all files of a checkpoint, which must not be changed any more."""
    found = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            found.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.digest()


def image_processor(path: Path) -> Any:
    """The checkpoint's processor on PIL, from its own class: some releases want torchvision otherwise."""
    named = json.loads((path / "preprocessor_config.json").read_text())["image_processor_type"]
    modules = {
        "Qwen2VLImageProcessor": "qwen2_vl.image_processing_pil_qwen2_vl",
        "CLIPImageProcessor": "clip.image_processing_pil_clip",
        "LlavaImageProcessor": "llava.image_processing_pil_llava",
    }
    module = importlib.import_module(f"transformers.models.{modules[named]}")
    return getattr(module, f"{named}Pil").from_pretrained(path)


def render(path: Path, messages: Sequence[Message]) -> str:
    """The chat template's text, each image still one placeholder token."""
    parts = [{**message, "content": _parts(message["content"])} for message in messages]
    return str(_open(path).tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True))


def prompt_token_ids(path: Path, messages: Sequence[Message], images: Sequence[Image.Image]) -> list[int]:
    """Token ids with every placeholder repeated as often as its image has embeddings."""
    return _prepare(path, messages, images)["input_ids"][0].tolist()


def oracle(
    path: Path,
    messages: Sequence[Message],
    images: Sequence[Image.Image] = (),
    *,
    max_new_tokens: int,
    min_new_tokens: int | None = None,
    ignore_eos: bool = True,
) -> OracleResult:
    """Greedy generation in fp32 with `model.generate`, one prompt at a time."""
    limits = (max_new_tokens, min_new_tokens, ignore_eos)
    words = json.dumps([messages, limits, [(image.mode, image.size) for image in images]])
    question = (Path(__file__).read_bytes(), digest(path), words.encode(), *(i.tobytes() for i in images))
    return OracleResult(**kept(question, lambda: asdict(_generated(path, messages, images, *limits))))


@torch.no_grad()
def _generated(
    path: Path,
    messages: Sequence[Message],
    images: Sequence[Image.Image],
    max_new_tokens: int,
    min_new_tokens: int | None,
    ignore_eos: bool,
) -> OracleResult:
    checkpoint = _open(path)
    inputs = _prepare(path, messages, images)
    config = copy.deepcopy(checkpoint.model.generation_config)
    config.max_new_tokens, config.min_new_tokens, config.do_sample = max_new_tokens, min_new_tokens, False
    config.eos_token_id = None if ignore_eos else checkpoint.eos_token_id
    config.return_dict_in_generate = config.output_scores = True
    out = checkpoint.model.generate(**inputs, generation_config=config)
    prompt = inputs["input_ids"][0].tolist()
    best = torch.stack(out.scores)[:, 0].topk(2, dim=-1)
    return OracleResult(
        prompt_token_ids=prompt,
        token_ids=out.sequences[0, len(prompt) :].tolist(),
        margins=(best.values[:, 0] - best.values[:, 1]).tolist(),
        runners_up=best.indices[:, 1].tolist(),
    )


@torch.no_grad()
def generate(
    path: Path, messages: Sequence[Message], *, max_new_tokens: int, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """Greedy output and its logits [tokens, vocabulary] before any processing; `options` are generate's."""
    checkpoint = _open(path)
    config = copy.deepcopy(checkpoint.model.generation_config)
    config.max_new_tokens, config.do_sample, config.eos_token_id = max_new_tokens, False, None
    config.return_dict_in_generate = config.output_logits = True
    for name, value in options.items():
        setattr(config, name, value)
    inputs = _prepare(path, messages, ())
    out = checkpoint.model.generate(**inputs, generation_config=config)
    return out.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.stack(out.logits)[:, 0]


@torch.no_grad()
def teacher_forced_logits(
    path: Path,
    messages: Sequence[Message],
    images: Sequence[Image.Image],
    token_ids: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [len(token_ids) + 1, vocabulary]: before each given token, and after the last."""
    checkpoint = _open(path) if dtype == torch.float32 else _open(path, dtype)
    model = checkpoint.model
    model.model.rope_deltas = None
    prefill = model(**_prepare(path, messages, images), use_cache=True, logits_to_keep=1)
    first: torch.Tensor = prefill.logits[0]
    if not token_ids:
        return first
    given = torch.tensor([list(token_ids)])
    rest = model(input_ids=given, past_key_values=prefill.past_key_values, use_cache=True)
    return torch.cat([prefill.logits[0], rest.logits[0]])


@torch.no_grad()
def hidden_states(
    path: Path, messages: Sequence[Message] | Sequence[int], images: Sequence[Image.Image] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, hidden] after the final norm, and logits [T, vocabulary]."""
    checkpoint = _open(path)
    checkpoint.model.model.rope_deltas = None
    if isinstance(messages[0], int):
        inputs = {"input_ids": torch.tensor([messages])}
    else:
        inputs = _prepare(path, messages, images)  # type: ignore[arg-type]
    out = checkpoint.model(**inputs, output_hidden_states=True)
    return out.hidden_states[-1][0], out.logits[0]


def assert_exact(
    results: Sequence[OracleResult], outputs: Iterable[Sequence[int]], *, min_distinct: int = MIN_DISTINCT
) -> None:
    """Every output equals the reference, or first differs at a tie; at most 1 % of them differ."""
    outputs = [list(output) for output in outputs]
    assert len(outputs) == len(results), f"{len(outputs)} outputs for {len(results)} references"
    differing = 0
    for number, (result, output) in enumerate(zip(results, outputs, strict=True)):
        reference = result.token_ids
        distinct = len(set(reference))
        assert distinct >= min_distinct, (
            f"reference {number} has only {distinct} distinct tokens: it proves little"
        )
        if output == reference:
            continue
        differing += 1
        index = first_difference(reference, output)
        where = f"output {number} differs at token {index} of {len(reference)}"
        assert index < min(len(reference), len(output)), f"{where}: {len(output)} tokens"
        margin = result.margins[index]
        assert margin < TIE_MARGIN, f"{where}: {output[index]} for {reference[index]}, margin {margin:.2e}"
        assert output[index] == result.runners_up[index], f"{where}: not the runner-up of a tie"
    assert differing * 100 <= len(results), f"{differing} of {len(results)} outputs differ, at ties"


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length if one is the other's beginning."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _prepare(
    path: Path, messages: Sequence[Message], images: Sequence[Image.Image]
) -> dict[str, torch.Tensor]:
    checkpoint = _open(path)
    text = render(path, messages)
    bos = checkpoint.tokenizer.bos_token
    # As transformers' processors do it: a template that wrote the first token is not given another.
    add_special_tokens = not (bos and text.startswith(bos))
    ids = checkpoint.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    inputs: dict[str, torch.Tensor] = {}
    lengths: list[int] = []
    if images:
        pixels = checkpoint.processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        inputs["pixel_values"] = pixels["pixel_values"]
        if "image_grid_thw" in pixels:
            inputs["image_grid_thw"] = pixels["image_grid_thw"]
            lengths = [int(n) // checkpoint.merge_size**2 for n in pixels["image_grid_thw"].prod(-1)]
        else:
            lengths = [checkpoint.model.config.image_seq_length] * len(images)
    expanded = _expand(ids, checkpoint.image_token_id, lengths)
    inputs["input_ids"] = torch.tensor([expanded])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == checkpoint.image_token_id).int()
    return inputs


def _expand(ids: Sequence[int], image_token_id: int, lengths: Sequence[int]) -> list[int]:
    places = ids.count(image_token_id) if isinstance(ids, list) else list(ids).count(image_token_id)
    if places != len(lengths):
        raise ValueError(f"{places} placeholders for {len(lengths)} images")
    remaining = iter(lengths)
    expanded: list[int] = []
    for token in ids:
        expanded.extend([token] * (next(remaining) if token == image_token_id else 1))
    return expanded
