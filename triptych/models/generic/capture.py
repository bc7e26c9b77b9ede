"""Admission by capture: what a class's own forward feeds its decoder, recorded for one prompt.

The class's base runs with a recorder in the decoder's place, with marks in the place of media features, and
with token ids in the place of embeddings. So it reads no weights, needs no features, and says of every token
which id or which row it is embedded as, its positions, its spans, and what else the decoder is given.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from triptych.base.errors import ConfigError
from triptych.models.generic.masks import CAPTURE, spans_of
from triptych.models.generic.sides import (
    MODALITIES,
    PROJECTION,
    base_of,
    decoder_of,
    path_of,
    with_module,
)

#: Token types that classes take from their processors, one per token.
TYPES = ("mm_token_type_ids", "token_type_ids")
#: How the names of a getter's media begin; their values are never read.
_MEDIA = ("pixel_values", "high_res_pixel_values", "input_features", "input_values")
#: Token types that are one for some tokens of a prompt, by the names that configs have for those.
_FIXED_TYPES = {"moe_mm_token_type_ids": ("image_token_id", "image_start_token_id", "image_end_token_id")}
#: The mask of frames of sounds, which is made of their lengths: these are an item's grid.
LENGTHS = "feature_attention_mask"
#: The names that forwards have for parameters of `get_rope_index`.
_FORWARDED = {"audio_seqlens": LENGTHS, "second_per_grids": "video_second_per_grid"}
#: Captured inputs that have a meaning of their own here, or none.
_KNOWN = frozenset(
    {"inputs_embeds", "attention_mask", "position_ids", "visual_pos_masks", "deepstack_visual_embeds"}
    | {"input_ids", "cache", "past_key_values", "return_dict", "use_cache", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "logits_to_keep", "cache_position"}
)


#: Columns of ids and marks: classes compare numbers of elements, not widths, and few columns cost little.
_WIDTH = 8
#: Rows of each item by modality.
Groups = Mapping[str, Sequence[int]]
#: Joins the features of several items as a class takes them.
Container = Callable[[list[torch.Tensor]], object]
#: Of the features, and of each deepstack level.
CONTAINERS: tuple[tuple[Container, Container], ...] = (
    (torch.cat, torch.cat),
    (list, list),
    (tuple, tuple),
    (torch.cat, list),
    (lambda parts: torch.cat(parts)[None], list),
)


class _Captured(Exception):
    """Ends a forward at the decoder."""


class _Features:
    """A getter's output; ConfigError, by name, where the class reads a field that is not known."""

    # Only handed on in an output.
    hidden_states = attentions = vision_outputs = qformer_outputs = router_logits = None

    def __init__(self, owner: str, **fields: Any) -> None:
        self._owner = owner
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"{self._owner} reads {name} of its features, which is not known: it cannot be served"
        )


class _Ids:
    """The rows of an embedding that holds each id in its first column, computed when asked for."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._width, self.device, self.dtype = width, device, torch.float32

    def __getitem__(self, index: Any) -> torch.Tensor:
        ids = index[0] if isinstance(index, tuple) else index
        ids = torch.as_tensor(ids, device=self.device)
        rows = torch.zeros(*ids.shape, self._width, device=self.device)
        rows[..., 0], rows[..., 1] = ids.float(), 1.0
        return rows


class IdEmbedding(nn.Module):
    """An embedding of ids as themselves."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = _Ids(width, device)

    def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.weight[input_ids]


class _Recorder(nn.Module):
    """Stands for the decoder: keeps what it is called with; all else is the decoder's."""

    def __init__(self, decoder: nn.Module, config: PreTrainedConfig, embedding: IdEmbedding) -> None:
        super().__init__()
        self.__dict__["decoder"] = decoder
        self.config = config
        self.embed_tokens = embedding
        # Says which dtype and device the shell has.
        self.own = nn.Parameter(torch.zeros(1, device=embedding.weight.device), requires_grad=False)
        self.names = list(inspect.signature(decoder.forward).parameters)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["decoder"], name)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, *args: Any, **kwargs: Any) -> None:
        error = _Captured()
        error.seen = {**dict(zip(self.names, args, strict=False)), **kwargs}  # type: ignore[attr-defined]
        raise error


@dataclass(frozen=True, slots=True)
class CapturedPrompt:
    """One prompt as the decoder would have got it.

    `embedded` [T] has the id that each token is embedded as, `rows` [T] the media row that is put over it, or
    -1. `positions` are [rows, T], or None where the decoder counts them itself. `masks` by layer type are
    those of `masks.py`. `inputs` are further inputs of the decoder, [T, ...] each.
    """

    embedded: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor | None
    masks: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    levels: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return spans_of(self.masks)


class PromptCapture:
    """The shell of one class's base. Thread-safe: it shares parameters with the model, and no state."""

    #: Further fields of a getter's output that the class reads, for adapters that know them.
    further_features: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def row_tokens(cls, config: Any) -> frozenset[int]:
        """Tokens of an item's placeholder that get a row each."""
        return frozenset(modality_tokens(config).values())

    def __init__(
        self,
        model: PreTrainedModel,
        modality: str,
        levels: int = 0,
        *,
        device: torch.device | None = None,
    ) -> None:
        """`device` is the decoder's where it looks something up for a prompt, else a CPU."""
        base, decoder = base_of(model), decoder_of(model)
        self.modality, self.levels = modality, levels
        self.config = captured_config(base.config)
        #: The placeholder's token.
        self.token = modality_tokens(base.config)[modality]
        #: Whether it has a getter of sound's features.
        self.hears = hasattr(base, "get_audio_features")
        self.decoder_config = captured_config(decoder.config)
        self._device = device or torch.device("cpu")
        embedding = IdEmbedding(_WIDTH, self._device)
        recorder = _Recorder(decoder, self.decoder_config, embedding)
        self._shell = with_module(base, path_of(base, decoder), recorder)
        # Llama 4's forward projects the features itself, which their encoder has done here.
        if "multi_modal_projector" in self._shell._modules:
            self._shell._modules["multi_modal_projector"] = nn.Identity()
        self._shell.config = self.config
        self._shell.get_input_embeddings = lambda: embedding
        self._fresh = dict(self._shell.__dict__)
        names = inspect.signature(base.forward).parameters
        self.type_names = tuple(name for name in TYPES if name in names)
        self._fixed_types = {
            name: [int(getattr(base.config, token)) for token in tokens]
            for name, tokens in _FIXED_TYPES.items()
            if name in names
        }
        if unknown := [n for n in names if n.endswith("token_type_ids") and n not in (*TYPES, *_FIXED_TYPES)]:
            raise ConfigError(
                f"{self.name} takes {', '.join(unknown)}, which is not known: it cannot be served"
            )
        self.grid_names = _grid_names(base, names)
        self._media = {each: _media_names(base, each, names) for each in MODALITIES}
        self._names = frozenset(names)
        self._lock = threading.Lock()
        #: A retriever that merges pictures itself: its base, given embeddings alone, counts positions.
        self._in_order = base is not model and _gives_embeddings(model, base, embedding)
        self.container = CONTAINERS[0]
        #: As `container`, of items of other modalities, from the first one on.
        self._containers: dict[str, tuple[Container, Container]] = {}

    def learn(
        self, token_ids: Sequence[int], types: torch.Tensor, rows: int, grids: Mapping[str, torch.Tensor]
    ) -> CapturedPrompt:
        """A prompt with one item, and with it whether features go in as one tensor, a list or a tuple.

        Raises what the class raises where it takes none of them.
        """
        failure: Exception | None = None
        for self.container in CONTAINERS:
            try:
                prompt = self.run(token_ids, types, [rows], grids)
                if prompt.rows[prompt.rows >= 0].tolist() != list(range(rows)):
                    raise ValueError("it does not put the rows over the placeholders")
                return prompt
            except ConfigError:
                raise
            except Exception as error:  # of any kind: code of the class
                failure = failure or error
        assert failure is not None
        raise failure

    @property
    def takes_details(self) -> bool:
        """Whether the class takes token types or grids of its items."""
        return bool(self.type_names or self._fixed_types or self.grid_names)

    @property
    def name(self) -> str:
        """The class's name, for messages."""
        return type(self._shell).__name__

    def run(
        self,
        token_ids: Sequence[int],
        types: torch.Tensor,
        rows: Sequence[int] = (),
        grids: Mapping[str, torch.Tensor] | None = None,
        *,
        others: Mapping[str, Sequence[int]] | None = None,
        generated: bool = False,
    ) -> CapturedPrompt:
        """Captures a prompt: `types` [type_names, T], `rows` of each item, grids of all items by name.

        `others` are the rows of each item that another getter gives, by its modality; their indices follow
        those of all rows before. With `generated` the tokens are the model's own: none is a part of an item.
        """
        ids = torch.tensor([list(token_ids)], device=self._device)
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), **(grids or {})}
        if (lengths := inputs.get(LENGTHS)) is not None:
            inputs[LENGTHS] = torch.arange(int(lengths.max())) < lengths[:, None]
        for index, name in enumerate(self.type_names):
            inputs[name] = types[index][None].to(self._device)
        for name, tokens in self._fixed_types.items():
            given = torch.isin(ids, torch.tensor([] if generated else tokens, device=self._device))
            inputs[name] = given.long()
        with self._lock, torch.no_grad():
            groups = {self.modality: rows, **(others or {})}
            unknown = [each for each in others or () if each not in self._containers]
            return self._learned(inputs, ids, groups, unknown)

    def _learned(
        self, inputs: dict[str, Any], ids: torch.Tensor, groups: Groups, unknown: Sequence[str]
    ) -> CapturedPrompt:
        """Tries in which forms the class takes items of `unknown`; raises what the last one raises."""
        if not unknown:
            return self._captured(inputs, ids, groups)
        failure: Exception = ValueError("it does not put the rows over the placeholders")
        for forms in product((self.container, *CONTAINERS), repeat=len(unknown)):
            self._containers.update(zip(unknown, forms, strict=True))
            try:
                prompt = self._captured(dict(inputs), ids, groups)
                if int((prompt.rows >= 0).sum()) == sum(map(sum, groups.values())):
                    return prompt
            except Exception as error:  # of any kind: code of the class
                failure = error
        for modality in unknown:
            del self._containers[modality]
        raise failure

    def _captured(self, inputs: dict[str, Any], ids: torch.Tensor, groups: Groups) -> CapturedPrompt:
        start = 0
        try:
            for modality, counts in groups.items():
                if counts:
                    container = self._containers.get(modality, self.container)
                    inputs |= dict.fromkeys(self._media[modality], torch.zeros(1, device=self._device))
                    features = self._features(counts, start, container)
                    setattr(self._shell, f"get_{modality}_features", lambda *_, f=features, **__: f)
                    start += sum(counts)
            self._shell(input_ids=ids, **inputs)
        except _Captured as captured:
            return self._prompt(captured.seen, ids.shape[1])  # type: ignore[attr-defined]
        finally:
            # Among them what a forward notes for the next one, such as `rope_deltas`.
            self._shell.__dict__.clear()
            self._shell.__dict__.update(self._fresh)
        raise ConfigError(f"{self.name} never calls its decoder: it cannot be served")

    def _features(self, rows: Sequence[int], start: int, container: tuple[Container, Container]) -> _Features:
        marks = _marks(start, sum(rows), _WIDTH, self._device)
        parts = [part.clone() for part in marks.split(list(rows))]
        join, join_level = container
        levels = [join_level([part.clone() for part in parts]) for _ in range(self.levels)]
        return _Features(
            self.name,
            pooler_output=join(parts),
            last_hidden_state=marks,
            deepstack_features=levels or None,
            # Of Gemma 4's sounds: no row is padding.
            attention_mask=marks[:, 1].bool(),
            **self.further_features,
        )

    def _prompt(self, seen: dict[str, Any], length: int) -> CapturedPrompt:
        embeds = seen["inputs_embeds"][0]
        if not bool((embeds[:, 1] == 1).all()):
            raise ConfigError(f"{self.name} changes embeddings before its decoder: it cannot be served")
        first = embeds[:, 0].round().long().cpu()
        positions = seen.get("position_ids")
        levels = seen.get("deepstack_visual_embeds") or ()
        masks = seen.get("attention_mask")
        if not isinstance(masks, dict):
            masks = {"full_attention": masks}
        made = {
            kind: mask for kind, mask in masks.items() if torch.is_tensor(mask) and mask.dtype == torch.bool
        }
        return CapturedPrompt(
            embedded=first.clamp(min=0),
            rows=torch.where(first < 0, -first - 1, -1),
            positions=None if positions is None or self._in_order else positions.reshape(-1, length).cpu(),
            masks={kind: mask for kind, mask in made.items() if mask.shape[0] != 1 or mask.dim() == 1},
            inputs={name: value[0] for name, value in self._inputs(seen, length).items()},
            levels=len(levels),
        )

    def _inputs(self, seen: dict[str, Any], length: int) -> dict[str, torch.Tensor]:
        """Further inputs of the decoder; ConfigError, by name, for one that is not one value per token."""
        inputs = {}
        for name, value in seen.items():
            if name in _KNOWN or value is None or value is False:
                continue
            if not torch.is_tensor(value) or tuple(value.shape[:2]) != (1, length):
                raise ConfigError(
                    f"{self.name} gives its decoder {name}, which is not known: it cannot be served"
                )
            inputs[name] = value
        return inputs


def _gives_embeddings(model: PreTrainedModel, base: PreTrainedModel, embedding: IdEmbedding) -> bool:
    """Whether it is a retriever that embeds tokens itself, so that its base knows of no pictures."""
    if getattr(model, PROJECTION, None) is None:
        return False
    recorder = _Recorder(base, base.config, embedding)
    try:
        with_module(model, path_of(model, base), recorder)(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=embedding.weight.device)
        )
    except _Captured as captured:
        return captured.seen.get("input_ids") is None  # type: ignore[attr-defined]
    return False


def captured_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config under which masks are made by `masks.py`."""
    own = copy.deepcopy(config)
    for part in (own, *(getattr(own, name, None) for name in own.sub_configs), own.get_text_config()):
        if part is not None:
            part._attn_implementation_internal = CAPTURE
    return own


def _marks(start: int, count: int, width: int, device: torch.device) -> torch.Tensor:
    """Rows [count, width] that can be told apart: row i has -1 - start - i in its first column."""
    rows = torch.zeros(count, width, device=device)
    rows[:, 0] = -1.0 - start - torch.arange(count, device=device)
    rows[:, 1] = 1.0
    return rows


def _media_names(base: nn.Module, modality: str, names: Mapping[str, object]) -> list[str]:
    """The arguments of the base that hold a getter's media."""
    getter = getattr(base, f"get_{modality}_features", None)
    parameters = inspect.signature(getter).parameters if getter is not None else ()
    return [name for name in parameters if name in names and name.startswith(_MEDIA)]


def _grid_names(base: nn.Module, names: Mapping[str, object]) -> tuple[str, ...]:
    """The processor's tensors that positions are computed from, sorted."""
    rope = getattr(base, "get_rope_index", None)
    if rope is None:
        return ()
    own = {"input_ids", "attention_mask", "inputs_embeds", "kwargs", "use_audio_in_video", *TYPES}
    taken = {_FORWARDED.get(name, name) for name in inspect.signature(rope).parameters}
    return tuple(sorted((taken & set(names)) - own))


def modality_tokens(config: Any) -> dict[str, int]:
    """The placeholder token of each modality that the config names."""
    named = {each: getattr(config, f"{each}_token_id", None) for each in ("image", "video", "audio")}
    return {modality: int(token) for modality, token in named.items() if token is not None}
