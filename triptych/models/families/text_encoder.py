"""The encoder side of text-to-text families: text or token ids in, a row per token out; its graphs."""

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
from triptych.base.request import MAX_CHARS_PER_TOKEN
from triptych.base.types import JsonObject, Options
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.encoder_graph import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    SupportsEncoderCudaGraph,
)
from triptych.models.geometry import MAX_ROWS
from triptych.models.weights.loading import KeyMap, empty_module, load_into

_KEYS = ("input_ids", "positions", "segment_ids")
_MIN_BUDGET = 64


def pad_own_segment(buffer: torch.Tensor, used: int) -> None:
    """-1, which is no text's number: padding attends to padding only."""
    buffer[used:] = -1


class PackedTexts(SupportsEncoderCudaGraph):
    """Encoder graphs of a text encoder, which says how its layers are walked.

    The buffers are `input_ids`, `positions` (each text's own, from 0) and `segment_ids` (which text a token
    is of), all int64 [token_budget]. The mask over them is [token_budget, token_budget]: attention costs what
    one text of the budget's length would, however short the texts are, so that no budget is larger than the
    longest text unless `--encoder-graph-budgets` asks for more.
    """

    modality: ClassVar[str]
    width: int
    #: Tokens of the longest text.
    max_tokens: int

    @abstractmethod
    def walk(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Rows [1, T, width] of token_ids and positions [1, T]; mask [1, 1, T, T] is true where one token
        attends to another, and true for each and itself."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=(self.modality,),
            buffer_keys=_KEYS,
            out_hidden_size=self.width,
            padding_logics={"segment_ids": pad_own_segment},
            max_token_budget=max(_MIN_BUDGET, self.max_tokens),
            min_token_budget=_MIN_BUDGET,
        )

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        return EncoderCudaGraphCaptureInputs(
            {key: torch.zeros(token_budget, device=device, dtype=torch.int64) for key in _KEYS}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        lengths = torch.tensor([item.rows for item in items])
        values = (
            torch.cat([item.tensors["input_ids"] for item in items]),
            torch.cat([torch.arange(item.rows) for item in items]),
            torch.arange(len(items)).repeat_interleave(lengths),
        )
        return EncoderCudaGraphReplayBuffers(dict(zip(_KEYS, values, strict=True)))

    @torch.no_grad()
    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        token_ids, positions, segments = (values[key] for key in _KEYS)
        mask = segments[:, None] == segments[None, :]
        return self.walk(token_ids[None], positions[None], mask[None, None])[0]


#: Of a batch's token positions, padding takes at most one part of so many.
_PADDING_SHARE = 4
TOKEN_IDS = "token_ids"


class TextEncoder(PackedTexts, EncoderSide):
    """The encoder of all text-to-text families; each has its keys, its stack and the walk of its layers."""

    modality: ClassVar[str] = "text"
    keys: ClassVar[KeyMap]
    #: transformers' class of the stack.
    stack_class: ClassVar[type[PreTrainedModel]]
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
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """The family's encoder stack, without weights."""
        stack: PreTrainedModel = cls.stack_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return stack

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
        if len(text) > self.max_tokens * MAX_CHARS_PER_TOKEN:
            raise TooLarge(
                f"encoder_prompt: {len(text)} characters are more than this encoder's {self.max_tokens} "
                "tokens hold; send a shorter text",
                param="encoder_prompt",
            )
        ids: list[int] = self.tokenizer(text)["input_ids"]
        if ids and max(ids) >= (size := int(self.config.vocab_size)):
            raise InvalidRequest(
                f"encoder_prompt: its text has the token {max(ids)}, and the model's vocabulary ends at "
                f"{size - 1}: leave the special token out",
                param="encoder_prompt",
            )
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
