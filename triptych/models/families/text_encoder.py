"""The encoder side that text-to-text families share: text or token ids in, one row per token out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import tokenizers
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from triptych.base.errors import ConfigError, InvalidRequest, TooLarge
from triptych.base.types import JsonObject, Options
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.folder import Checkpoint
from triptych.models.families.packed_texts import PackedTexts
from triptych.models.weights.loading import KeyMap, empty_module, load_into

#: Tokens of one item where the model itself has no limit: attention grows with their square.
MAX_ROWS = 4096
#: Of a batch's token positions, padding takes at most one part of so many.
_PADDING_SHARE = 4
TOKEN_IDS = "token_ids"
#: No vocabulary's token is longer.
_MAX_CHARS_PER_TOKEN = 128


class TextEncoder(PackedTexts, EncoderSide):
    """The encoder of all text-to-text families; each has its keys, its stack and the walk of its layers."""

    modality: ClassVar[str] = "text"
    keys: ClassVar[KeyMap]
    module: nn.Module

    def __init__(
        self,
        config: PreTrainedConfig,
        module: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.module = module
        self.tokenizer = tokenizer
        self.device = device
        self.dtype = dtype
        self.width = int(config.d_model)
        self.max_tokens = self.max_rows(config) or MAX_ROWS

    @classmethod
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> Self:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config = cls.read_config(path)
        tokenizer = load_tokenizer(path)
        module = empty_module(lambda: cls.stack(config, dtype))
        names = cls.keys.encoder_names(checkpoint.files)
        load_into(
            module,
            checkpoint,
            names,
            device=device,
            dtype=dtype,
            quantize=quantize,
            computed=cls.computed(module),
        )
        return cls(config, module, tokenizer, device=device, dtype=dtype)

    @classmethod
    def read_config(cls, path: Path) -> PreTrainedConfig:
        """The checkpoint's config; ConfigError for one that the family does not serve."""
        return load_config(path)

    @classmethod
    @abstractmethod
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        """The family's encoder stack, without weights."""

    @classmethod
    def computed(cls, stack: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Tensors by name that checkpoints may leave out, since every model computes them itself."""
        return {}

    @classmethod
    def max_rows(cls, config: PreTrainedConfig) -> int | None:
        """Positions that the encoder has; None where it does not count them."""
        return None

    @classmethod
    def processor_config(cls, path: Path) -> JsonObject:
        """The version of the tokenizers library; the tokenizer's files are in the model key already."""
        return {"tokenizers": tokenizers.__version__}

    def sample(self) -> bytes:
        return b"a"

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        """`media` are the bytes of UTF-8 text, or with the option form "token_ids" little-endian
        uint32 numbers."""
        form = options.get("form")
        unknown = sorted(set(options) - {"form"})
        if unknown or form not in (None, TOKEN_IDS):
            raise InvalidRequest(
                f"processor_options: a text takes only form={TOKEN_IDS!r}", param="processor_options"
            )
        ids = self._token_ids(media) if form else self._tokenise(media)
        if not ids:
            raise InvalidRequest("encoder_prompt: it has no tokens", param="encoder_prompt")
        if len(ids) > self.max_tokens:
            raise TooLarge(
                f"encoder_prompt: {len(ids)} tokens are more than this encoder's {self.max_tokens}; "
                "send a shorter text",
                param="encoder_prompt",
            )
        return PreparedItem(
            rows=len(ids),
            length=0,
            grid_thw=(),
            cost=len(ids),
            tensors={"input_ids": torch.tensor(ids, dtype=torch.int64)},
        )

    def _tokenise(self, data: bytes) -> list[int]:
        try:
            text = bytes(data).decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest("encoder_prompt: not UTF-8 text", param="encoder_prompt") from None
        # Tokenising takes seconds for some MiB, which no request may cost before it is admitted.
        if len(text) > self.max_tokens * _MAX_CHARS_PER_TOKEN:
            raise TooLarge(
                f"encoder_prompt: {len(text)} characters are more than this encoder's {self.max_tokens} "
                "tokens hold; send a shorter text",
                param="encoder_prompt",
            )
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def _token_ids(self, data: bytes) -> list[int]:
        size = int(self.config.vocab_size)
        if len(data) % 4:
            raise InvalidRequest("encoder_prompt: token ids take four bytes each", param="encoder_prompt")
        ids = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
        if ids and max(ids) >= size:
            raise InvalidRequest(
                f"encoder_prompt: token id {max(ids)} is not below the vocabulary's size, {size}",
                param="encoder_prompt",
            )
        return ids

    @torch.no_grad()
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        rows: dict[int, torch.Tensor] = {}
        for group in groups_by_length([item.rows for item in items]):
            rows.update(zip(group, self._encode([items[index] for index in group]), strict=True))
        return [rows[index] for index in range(len(items))]

    def _encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """One padded call. The mask keeps padding out of every row that counts."""
        longest = max(item.rows for item in items)
        ids = torch.zeros(len(items), longest, dtype=torch.int64)
        mask = torch.zeros(len(items), longest, dtype=torch.int64)
        for row, item in enumerate(items):
            ids[row, : item.rows] = item.tensors["input_ids"]
            mask[row, : item.rows] = 1
        padded = None if bool(mask.all()) else mask.to(self.device)
        out = self.module(input_ids=ids.to(self.device), attention_mask=padded).last_hidden_state
        return [out[row, : item.rows].clone() for row, item in enumerate(items)]


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer; ConfigError where it has none that can be loaded."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"MODEL={path}: its tokenizer cannot be loaded: {error}") from error


def groups_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in groups that are padded together, shortest first, so that padding stays a small share."""
    groups: list[list[int]] = []
    held = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        size = (len(groups[-1]) + 1) * lengths[index] if groups else 0
        if groups and (size - held - lengths[index]) * _PADDING_SHARE <= size:
            groups[-1].append(index)
            held += lengths[index]
        else:
            groups.append([index])
            held = lengths[index]
    return groups
