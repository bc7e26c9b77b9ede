"""Identity of checkpoints: by their content, never by their folder."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from triptych.base.errors import ConfigError
from triptych.base.hashing import framed_digest, tower_of
from triptych.base.progress import BYTES, Progress
from triptych.base.types import JsonObject
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.folder import read_config, safetensors_files
from triptych.models.registry import Family, family_of
from triptych.models.weights.quantization import NONE, decoder_is_quantized, encoder_is_quantized

logger = logging.getLogger(__name__)

#: Changes when stored rows or KV blocks come to mean something else.
LAYOUT_VERSION = 1
#: Of tensors outside the tower only head and samples are read: enough to tell checkpoints apart, and fast.
_HEAD_BYTES = 64 * 1024
_SAMPLES = 8
_SAMPLE_BYTES = 4 * 1024
#: Of every tensor so much of head, middle and tail is read again to tell that a file is still the same.
_CHECK_BYTES = 1024
#: A file written so lately could change again without changing its time stamps.
_SETTLED_SECONDS = 2.0
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "normalizer.json",
    "chat_template.jinja",
    "chat_template.json",
)
#: Those of them that turn text into tokens: a plan has the tokens that stand for an item.
_VOCABULARY_FILES = frozenset(
    name for name in _TOKENIZER_FILES if not name.startswith(("chat_template", "tokenizer_config"))
)
#: Of tokenizer.json: what a call of it changes.
_OF_CALLS = frozenset({"truncation", "padding"})
#: Of config.json: what transformers notes about itself and about where the folder lay.
_INCIDENTAL = frozenset({"_name_or_path", "transformers_version"})
#: Of any part: what no row depends on. The dtype is given, and a quantized tower's tensors are digested.
_NOT_OF_ROWS = _INCIDENTAL | {"dtype", "torch_dtype", "use_cache", "quantization_config"}
#: Of the text model's part, and of the whole where it has one: what its decoder alone reads.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_SPECIAL_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"})
_OF_DECODERS = _SPECIAL_TOKENS | {
    "attention_dropout",
    "initializer_range",
    "max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "vocab_size",
}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """`model_key` names model, weights, tokenizer, dtype and quantization; `namespace` what embeddings are.

    Checkpoints whose towers compute alike have one namespace, whatever their decoders are: fine-tunes with a
    frozen tower, and the quantized form of a checkpoint.
    """

    model_key: str
    namespace: str
    modality: str = "image"


def model_identity(
    path: Path, *, dtype: torch.dtype | str, revision: str = "", quantization: str = NONE
) -> ModelIdentity:
    """The identity of a checkpoint; `revision` stands for the weights where given, else they are digested."""
    path = Path(path)
    raw = read_config(path)
    config = {name: value for name, value in raw.items() if name not in _INCIDENTAL}
    family = family_of(path)
    weights, tower = (f"revision:{revision}",) * 2 if revision else _weights_digests(path, family)
    named = str(dtype).removeprefix("torch.").encode()
    parts = [
        ("domain", b"triptych.model_key"),
        ("layout", str(LAYOUT_VERSION).encode()),
        ("config", json.dumps(config, sort_keys=True).encode()),
        ("weights", weights.encode()),
        ("tokenizer", _tokenizer_digest(path).encode()),
        ("dtype", named),
    ]
    plain_key = framed_digest(parts)
    quantized_key = framed_digest([*parts, ("quantization", quantization.encode())])
    modality = family.encoder.modality_of(path)
    # Of texts, all that prepares the tower's input.
    vocabulary = _tokenizer_digest(path) if modality == "text" else _vocabulary_digest(path)
    encoder, of_rows = family.encoder, _config_of_rows(_read_config(path, raw))
    rows = framed_digest(
        (
            ("domain", b"triptych.tower"),
            ("layout", str(LAYOUT_VERSION).encode()),
            (
                "config",
                json.dumps(of_rows, sort_keys=True, default=str).encode(),
            ),
            ("weights", tower.encode()),
            ("vocabulary", vocabulary.encode()),
            ("dtype", named),
            ("quantization", (quantization if encoder_is_quantized(quantization) else NONE).encode()),
        )
    )
    return ModelIdentity(
        quantized_key if decoder_is_quantized(quantization) else plain_key,
        _namespace(encoder.processor_config(path), rows),
        modality,
    )


def _namespace(config: JsonObject, rows: str) -> str:
    """64 hex characters, of which `tower_of` is that of `rows`."""
    processor = json.dumps(config, sort_keys=True, default=str)
    items = framed_digest(
        (("domain", b"triptych.namespace"), ("rows", rows.encode()), ("processor", processor.encode()))
    )
    return tower_of(rows) + items[len(tower_of(rows)) :]


def _read_config(path: Path, raw: JsonObject) -> JsonObject:
    """As transformers reads it, which releases of it write down in different ways, else as it is."""
    try:
        read: JsonObject = load_config(path).to_dict()
    except ConfigError:
        return raw
    return read


def _config_of_rows(config: JsonObject) -> JsonObject:
    """config.json without what no row depends on; all of what is not known to be so is kept."""
    has_text = any(isinstance(config.get(name), dict) for name in _TEXT_PARTS)
    left_out = _NOT_OF_ROWS | _SPECIAL_TOKENS if has_text else _NOT_OF_ROWS
    kept: JsonObject = {}
    for name, value in config.items():
        if name in left_out:
            continue
        if isinstance(value, dict):
            out = _NOT_OF_ROWS | _OF_DECODERS if name in _TEXT_PARTS else _NOT_OF_ROWS
            value = {key: each for key, each in value.items() if key not in out}
        kept[name] = value
    return kept


def _vocabulary_digest(path: Path) -> str:
    files = {name: path / name for name in _VOCABULARY_FILES if (path / name).is_file()}
    held = {name: file.read_bytes() for name, file in files.items()}
    if "tokenizer.json" in held:
        with contextlib.suppress(ValueError):
            given = json.loads(held["tokenizer.json"])
            given = {key: value for key, value in given.items() if key not in _OF_CALLS}
            # It has all of the others in it.
            held = {"tokenizer.json": json.dumps(given, sort_keys=True).encode()}
    return framed_digest(sorted(held.items()))


def _tokenizer_digest(path: Path) -> str:
    files = [(name, path / name) for name in _TOKENIZER_FILES]
    return framed_digest((name, file.read_bytes()) for name, file in files if file.is_file())


def _weights_digests(path: Path, family: Family) -> tuple[str, str]:
    """Digests of all tensors and of the tower's, cached in a sidecar file with the stamps of the files."""
    files = safetensors_files(path)
    stamps = [_stamp(file) for file in files]
    sidecar = _sidecar(path)
    known = _recall(sidecar, stamps)
    if known is not None:
        return known
    names_of = family.keys.encoder_names
    total = sum(file.stat().st_size for file in files)
    with Progress("digesting weights", total, BYTES) as running:
        found = (entry for file in files for entry in _tensor_digests(file, names_of, running.advance))
        tensors = sorted(found)
    digest = framed_digest((key, value.encode()) for key, value in tensors)
    tower = digest
    if family.encoder.has_known_keys(path, family.keys):
        names = names_of([key for key, _ in tensors])
        # By their names in the module: other releases spell the keys otherwise.
        tower = framed_digest(sorted((names[key], value.encode()) for key, value in tensors if key in names))
    if all(time.time_ns() - _changed_ns(file) > _SETTLED_SECONDS * 1e9 for file in files):
        _remember(sidecar, stamps, digest, tower)
    return digest, tower


def _stamp(file: Path) -> list[str | int]:
    """Name, size, times, inode and sampled content: a file with another one is digested again.

    Size and time of modification alone are kept by `rsync --times`, `cp -p` and restored backups.
    """
    stat = file.stat()
    return [file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, _sampled(file)]


def _changed_ns(file: Path) -> int:
    stat = file.stat()
    return max(stat.st_mtime_ns, stat.st_ctime_ns)


def _sampled(file: Path) -> str:
    """Digest of the file's header and of head, middle and tail of every tensor."""
    header, start = _header(file)
    digest = blake3(json.dumps(header, sort_keys=True).encode())
    with file.open("rb", buffering=0) as source:
        for begin, end in _spans(header).values():
            for offset, length in _pieces(end - begin, head=_CHECK_BYTES, samples=2, each=_CHECK_BYTES):
                digest.update(os.pread(source.fileno(), length, start + begin + offset))
    return digest.hexdigest()


def _tensor_digests(
    file: Path, tower: Callable[[Iterable[str]], Mapping[str, str]], advance: Callable[[int], None]
) -> Iterator[tuple[str, str]]:
    """(key, dtype, shape and content's digest) of each tensor; one outside the tower by head and samples."""
    header, start = _header(file)
    spans = _spans(header)
    whole = tower(list(spans))
    with file.open("rb") as source:
        for key, (begin, end) in spans.items():
            size = end - begin
            pieces = [(0, size)]
            if key not in whole:
                pieces = _pieces(size, head=_HEAD_BYTES, samples=_SAMPLES, each=_SAMPLE_BYTES)
            digest = blake3(max_threads=blake3.AUTO)
            for offset, length in pieces:
                source.seek(start + begin + offset)
                while length > 0 and (chunk := source.read(min(length, 1 << 24))):
                    digest.update(chunk)
                    length -= len(chunk)
            advance(size)
            yield key, f"{header[key]['dtype']} {header[key]['shape']} {digest.hexdigest()}"


def _spans(header: JsonObject) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes begin and end, from the first tensor's on."""
    return {key: tuple(entry["data_offsets"]) for key, entry in header.items() if key != "__metadata__"}


def _pieces(size: int, *, head: int, samples: int, each: int) -> list[tuple[int, int]]:
    """(offset, length) of the first `head` bytes, then of `samples` of `each`, evenly up to the last byte.

    All of it where that is no more.
    """
    if size <= head + samples * each:
        return [(0, size)]
    rest = size - head - each
    return [(0, head), *((head + rest * n // samples, each) for n in range(1, samples + 1))]


def _header(file: Path) -> tuple[JsonObject, int]:
    """A safetensors file's header, and where the tensors' bytes begin."""
    try:
        with file.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header: JsonObject = json.loads(source.read(length))
            return header, 8 + length
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file} is damaged ({error}): fetch the checkpoint again") from error


def _sidecar(path: Path) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return base / "triptych" / "weights" / f"{blake3(str(path.resolve()).encode()).hexdigest()[:32]}.json"


def _recall(sidecar: Path, stamps: list[list[str | int]]) -> tuple[str, str] | None:
    """The digests noted for exactly these files; None if none are, or none can be read."""
    try:
        cached = json.loads(sidecar.read_text(encoding="utf-8"))
        # Earlier releases noted none of the tower.
        if cached["files"] == stamps and cached["layout"] == LAYOUT_VERSION and cached.get("tower"):
            return str(cached["digest"]), str(cached["tower"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.info("weights are digested again: %s cannot be read (%s)", sidecar, error)
    return None


def _remember(sidecar: Path, stamps: list[list[str | int]], digest: str, tower: str) -> None:
    text = json.dumps({"layout": LAYOUT_VERSION, "files": stamps, "digest": digest, "tower": tower})
    aside = sidecar.with_name(f"{sidecar.name}.{os.getpid()}")
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(sidecar)
    except OSError as error:
        logger.info("the digest of the weights is not kept: %s cannot be written (%s)", sidecar, error)
