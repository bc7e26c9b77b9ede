"""LoRA adapters of --lora-modules: folders as PEFT writes them, read or refused before vLLM starts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.hashing import framed_digest
from triptych.base.types import JsonObject
from triptych.models.checkpoint.pooling import read_task
from triptych.models.identity import model_identity
from triptych.models.registry import family_of

MAX_ADAPTERS = 128
#: As a model is named: a client's words, a metric's label, a word of vLLM's command line.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: A tensor of a linear layer: its module as the class names it.
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_[AB](?:\.default)?\.weight")
#: The layers behind the last one, by their last names.
_HEADS = ("lm_head", "score")
#: vLLM's values of --max-lora-rank.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: Adapters of one batch: each has a place of the largest rank in every layer.
_IN_A_BATCH = 4
_REMERGE = "merge it into a checkpoint of its own (PEFT's merge_and_unload) and serve that"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is served. `key` names model and weights, wherever the folder lies."""

    name: str
    path: Path
    rank: int
    key: str


def parse_modules(text: str) -> dict[str, Path]:
    """The folders of --lora-modules by name; ConfigError for what is no NAME=DIR."""
    modules: dict[str, Path] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, equals, folder = word.partition("=")
        if not equals or not folder or not _NAME.fullmatch(name):
            raise ConfigError(
                f"--lora-modules {word[:200]!r}: write NAME=DIR, the name of letters, digits, '.', '_', ':', "
                "'/' and '-'; several have commas between them, or a flag each"
            )
        if name in modules:
            raise ConfigError(f"--lora-modules names {name!r} twice: give each adapter a name of its own")
        modules[name] = Path(folder)
    if len(modules) > MAX_ADAPTERS:
        raise ConfigError(f"--lora-modules names {len(modules)} adapters: at most {MAX_ADAPTERS}")
    return modules


def read_adapters(config: PDConfig) -> tuple[Adapter, ...]:
    """The adapters of a worker; ConfigError, by name, for one that cannot be served."""
    modules = parse_modules(config.lora_modules)
    if not modules:
        return ()
    path = Path(config.model)
    served_name = config.served_model_name or path.resolve().name
    if served_name in modules:
        raise ConfigError(
            f"--lora-modules: {served_name!r} is the model's own name: give the adapter another one"
        )
    identity = model_identity(path, dtype=config.dtype, revision=config.model_revision, quantization="none")
    tower, scores = family_of(path).keys.encoder_names, read_task(path) == "score"
    adapters = []
    for name, folder in modules.items():
        rank = _rank(name, folder)
        keys = _keys(name, folder)
        check_tensors(name, keys, [key for key in keys if tower([f"{_module(key)}.weight"])])
        if scores and (of_head := [key for key in keys if _module(key).rpartition(".")[2] in _HEADS]):
            raise ConfigError(
                f"--lora-modules {name}: {of_head[0]} is of the head, of which vLLM makes its scores once, "
                f"without adapters: train it with target_modules of the layers alone, or {_REMERGE}"
            )
        adapters.append(Adapter(name, folder.resolve(), rank, _key(identity.model_key, folder)))
    return tuple(adapters)


def check_tensors(name: str, keys: Sequence[str], of_tower: Sequence[str]) -> None:
    """ConfigError, which names a tensor, for what is no LoRA of the language model's layers."""
    if not keys:
        raise ConfigError(f"--lora-modules {name}: {_WEIGHTS} has no tensors: train the adapter again")
    if others := [key for key in keys if not _module(key)]:
        raise ConfigError(
            f"--lora-modules {name}: {others[0]} is no LoRA of a linear layer, and vLLM would not apply it "
            f"to a picture's prompt as it was trained: {_REMERGE}"
        )
    if of_tower:
        raise ConfigError(
            f"--lora-modules {name}: {of_tower[0]} is of the tower or projector, whose embeddings all "
            "adapters of a model share: train it with target_modules of the language model alone, or "
            f"{_REMERGE}, with encoder workers of its own"
        )


def lora_flags(adapters: Sequence[Adapter], device: str) -> list[str]:
    """vLLM's words for them; none without adapters."""
    if not adapters:
        return []
    rank = max(adapter.rank for adapter in adapters)
    # vLLM 0.32 on a CPU gives requests without an adapter the last place's: there it stays empty.
    most = len(adapters) + 1 if device == "cpu" else min(len(adapters), _IN_A_BATCH)
    return [
        "--enable-lora",
        *("--max-lora-rank", str(next(each for each in RANKS if each >= rank))),
        *("--max-loras", str(most), "--max-cpu-loras", str(max(most, len(adapters)))),
        *("--lora-modules", *(json.dumps({"name": a.name, "path": str(a.path)}) for a in adapters)),
    ]


def check_server(adapters: Sequence[Adapter], there: Collection[str], device: str) -> None:
    """ConfigError for adapters that the server at --engine-url does not list."""
    if missing := sorted({adapter.name for adapter in adapters} - set(there)):
        raise ConfigError(
            f"--lora-modules {missing[0]}: the server at --engine-url does not have it: start it with "
            f"{' '.join(lora_flags(adapters, device))}"
        )


def _rank(name: str, folder: Path) -> int:
    """The largest rank of its layers; ConfigError for a kind of adapter that vLLM does not apply."""
    file = folder / _CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--lora-modules {name}: {file} is not what PEFT writes of a LoRA ({error!r}): give the folder "
            "of save_pretrained"
        ) from error
    if reason := _unsupported(config):
        raise ConfigError(
            f"--lora-modules {name}: {file} has {reason}, which vLLM does not apply: {_REMERGE}"
        )
    if not all(isinstance(rank, int) and 0 < rank <= RANKS[-1] for rank in ranks):
        raise ConfigError(
            f"--lora-modules {name}: {file} has a rank that is not 1 to {RANKS[-1]}: {_REMERGE}"
        )
    return max(ranks)


def _unsupported(config: JsonObject) -> str:
    if config.get("peft_type", "LORA") != "LORA":
        return f"peft_type {config['peft_type']}"
    if config.get("bias", "none") != "none":
        return f"bias {config['bias']}"
    # More of a kind that it knows itself vLLM refuses when it starts.
    return next((name for name in ("use_dora", "modules_to_save", "lora_bias") if config.get(name)), "")


def _keys(name: str, folder: Path) -> list[str]:
    file = folder / _WEIGHTS
    if not file.is_file():
        raise ConfigError(
            f"--lora-modules {name}: {folder} has no {_WEIGHTS}: save it with PEFT's "
            "save_pretrained(safe_serialization=True); pickled files are never read"
        )
    try:
        with safe_open(file, "np") as tensors:
            return sorted(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--lora-modules {name}: {file} is damaged ({error}): fetch it again") from error


def _module(key: str) -> str:
    """The layer that a tensor is for; "" where it is no LoRA of a linear layer."""
    match = _TENSOR.fullmatch(key)
    return match[1] if match else ""


def _key(model_key: str, folder: Path) -> str:
    weights = blake3()
    weights.update_mmap(folder / _WEIGHTS)
    return framed_digest(
        (
            ("domain", b"triptych.adapter"),
            ("model_key", model_key.encode()),
            ("config", (folder / _CONFIG).read_bytes()),
            ("weights", weights.digest()),
        )
    )
