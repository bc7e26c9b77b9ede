"""Whisper: speech to text. A window of a file is an item; its features are those of the whole file."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.whisper.modeling_whisper import WhisperDecoder, WhisperEncoder
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import JsonObject, Options
from triptych.models.audio import AudioFile, FeatureCache, Features, Silence
from triptych.models.base import (
    DecoderSide,
    EncoderSide,
    GenerationDefaults,
    LogitsRule,
    Media,
    PreparedItem,
    PromptDefaults,
)
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.families.encdec import EncDecDecoder
from triptych.models.families.fixed_size import FixedSizeEncoder
from triptych.models.families.logits_rules import Only, Timestamps, checkpoint_rules
from triptych.models.weights.loading import KeyMap, empty_module, load_into

TASKS = ("transcribe", "translate")


class WhisperPrompts:
    """The prompts of a checkpoint, by its `generation` config. Options, all of them optional:

    `language` (a code, an English name or the token's text; English by default), `task`,
    `timestamps`, `prompt_ids` (tokens of text that went before), `detect_language` (the prompt is the start
    token alone, and the only output that counts is a language's token).
    """

    def __init__(self, start: int, generation: Options, max_positions: int) -> None:
        self.start = start
        self.languages: dict[str, int] = dict(generation.get("lang_to_id") or {})
        self.tasks: dict[str, int] = dict(generation.get("task_to_id") or {})
        self.multilingual = bool(generation.get("is_multilingual", bool(self.languages))) and bool(
            self.languages
        )
        self.no_timestamps: int | None = generation.get("no_timestamps_token_id")
        self._language = generation.get("language") or "en"
        self._last_initial = generation.get("max_initial_timestamp_index")
        suppressed = list(generation.get("suppress_tokens") or ())
        before = generation.get("prev_sot_token_id")
        # `generate` finds the token there when the checkpoint does not name it.
        self._before = suppressed[-2] if before is None and len(suppressed) > 1 else before
        self._max_before = max_positions // 2 - 1

    def of(self, options: Options) -> PromptDefaults:
        """The decoder prompt. InvalidRequest(param: the option) for what this checkpoint cannot do."""
        ids = [self.start]
        if options.get("detect_language"):
            self._check_multilingual("detect_language")
            return PromptDefaults(self.start, (self.start,))
        language, task = options.get("language") or "", options.get("task") or "transcribe"
        if task not in TASKS:
            raise InvalidRequest(f"task: {task!r} is none of {', '.join(TASKS)}", param="task")
        if self.multilingual:
            ids.append(self.language_id(language or self._language))
            if task in self.tasks:
                ids.append(self.tasks[task])
        elif task == "translate":
            self._check_multilingual("task")
        elif language and _code(language) != "en":
            self._check_multilingual("language")
        if options.get("timestamps"):
            self._first_time()
        elif self.no_timestamps is not None:
            ids.append(self.no_timestamps)
        return PromptDefaults(self.start, (*self._previous(options), *ids))

    def language_id(self, language: str) -> int:
        """The token of a language; InvalidRequest, naming those known, for another."""
        token = self.languages.get(f"<|{_code(language)}|>")
        if token is None:
            known = ", ".join(sorted(name.strip("<|>") for name in self.languages))
            raise InvalidRequest(
                f"language: {language!r} is unknown; this model has {known}", param="language"
            )
        return token

    def rules(self, defaults: GenerationDefaults, options: Options) -> tuple[LogitsRule, ...]:
        """The checkpoint's rules and those of the task."""
        if options.get("detect_language"):
            return (Only(tuple(self.languages.values())),)
        rules = checkpoint_rules(defaults, options)
        if not options.get("timestamps"):
            return rules
        eos = defaults.eos_token_ids[0] if defaults.eos_token_ids else 0
        return (*rules, Timestamps(self._first_time(), eos, self._last_initial))

    def _previous(self, options: Options) -> tuple[int, ...]:
        given = tuple(options.get("prompt_ids") or ())
        if not given:
            return ()
        if self._before is None:
            raise InvalidRequest("prompt: this model has no token for previous text", param="prompt")
        return (int(self._before), *given[-self._max_before :])

    def _first_time(self) -> int:
        if self.no_timestamps is None:
            raise InvalidRequest(
                "timestamps: this checkpoint's generation_config names no no_timestamps_token_id",
                param="timestamps",
            )
        return self.no_timestamps + 1

    def _check_multilingual(self, param: str) -> None:
        if not self.multilingual:
            raise InvalidRequest(
                f"{param}: this model knows English only: use POST /v1/audio/transcriptions, and leave "
                "language out or send en",
                param=param,
            )


def _code(language: str) -> str:
    name = language.strip().lower().strip("<|>")
    return str(TO_LANGUAGE_CODE.get(name, name))


KEYS = KeyMap(
    encoder=((r"^(model\.)?encoder\.", ""),),
    decoder=(
        (r"^(model\.)?decoder\.", "decoder."),
        (r"^proj_out\.", "lm_head."),
    ),
    tied=(("lm_head.weight", "decoder.embed_tokens.weight"),),
)
#: Features of the latest files: windows of one file come one after another.
_CACHE_BYTES = 256 << 20


class WhisperAudioEncoder(FixedSizeEncoder):
    """The encoder of windows of an `AudioFile`; the option `start_frame` is a window's first frame."""

    modality: ClassVar[str] = "audio"
    keys: ClassVar[KeyMap] = KEYS
    input_name: ClassVar[str] = "input_features"

    def __init__(
        self,
        config: PreTrainedConfig,
        module: nn.Module,
        features: Features,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = module
        self.device = device
        self.dtype = dtype
        self.width = int(config.d_model)
        self._rows = int(config.max_source_positions)
        self._mel_bins = int(config.num_mel_bins)
        self._features = features
        self._cache = FeatureCache(_CACHE_BYTES)

    @classmethod
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> Self:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config = load_config(path)
        features = Features(path)
        if features.window != 2 * config.max_source_positions:
            raise ConfigError(
                f"MODEL={path}: its features have {features.window} frames a window, its tower takes "
                f"{2 * config.max_source_positions}: fetch the checkpoint again"
            )
        module = empty_module(
            lambda: WhisperEncoder._from_config(config, dtype=dtype, attn_implementation="sdpa")
        )
        names = cls.keys.encoder_names(checkpoint.files)
        load_into(module, checkpoint, names, device=device, dtype=dtype, quantize=quantize)
        return cls(config, module, features, device=device, dtype=dtype)

    @classmethod
    def processor_config(cls, path: Path) -> JsonObject:
        return Features(path).config

    def sample(self) -> AudioFile:
        return Silence()

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        """`grid_thw` of the result: the window's first frame, its real frames, and the whole file's."""
        start = options.get("start_frame", 0)
        if (
            set(options) - {"start_frame"}
            or not isinstance(start, int)
            or isinstance(start, bool)
            or start < 0
        ):
            raise InvalidRequest(
                "mm_processor_kwargs: audio takes only start_frame, a whole number from 0",
                param="mm_processor_kwargs",
            )
        features, frames = self._cache.get(media.digest, lambda: self._compute(media))
        if start >= frames:
            raise InvalidRequest(
                f"start_frame: the file has {frames} frames, none at {start}",
                param="mm_processor_kwargs.start_frame",
            )
        window = features[:, start : start + self._features.window]
        real = min(frames - start, self._features.window)
        padded = functional.pad(window, (0, self._features.window - window.shape[1]))
        return PreparedItem(
            rows=self._rows,
            length=0,
            grid_thw=(start, real, frames),
            cost=self._rows,
            tensors={"input_features": padded.clone()},
        )

    def _compute(self, media: AudioFile) -> tuple[torch.Tensor, int]:
        waveform = media.waveform(self._features.rate)
        return self._features(waveform), self._features.real_frames(waveform)

    @property
    def rows_per_item(self) -> int:
        return self._rows

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self._mel_bins, self._features.window)

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.module(inputs).last_hidden_state
        return rows


class WhisperTextDecoder(EncDecDecoder):
    """Prompt and rules follow the task: `language`, `task`, `timestamps`, `detect_language`, `prompt_ids`."""

    modality: ClassVar[str] = "audio"
    scale_query: ClassVar[bool] = True
    keys: ClassVar[KeyMap] = KEYS
    stack_class: ClassVar[type[PreTrainedModel]] = WhisperDecoder

    @cached_property
    def prompts(self) -> WhisperPrompts:
        """The prompts and rules of this checkpoint's tasks."""
        return WhisperPrompts(
            self.start_token(), self.generation.extra, int(self.config.max_target_positions)
        )

    def walk(self, hidden: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        stack = self.module.decoder
        hidden = hidden + stack.embed_positions.weight[positions]
        for layer in stack.layers:
            # The layer only asks whether there are encoder rows; its cross-attention does not want them.
            hidden = layer(hidden, None, hidden, attn_metadata=attention)
        normed: torch.Tensor = stack.layer_norm(hidden)
        return normed

    @classmethod
    def max_rows(cls, config: PreTrainedConfig) -> int | None:
        return int(config.max_source_positions)

    @classmethod
    def max_positions(cls, config: PreTrainedConfig) -> int:
        return int(config.max_target_positions)

    def prompt_defaults(self, options: Options) -> PromptDefaults:
        return self.prompts.of(options)

    def logits_rules(self, defaults: GenerationDefaults, options: Options) -> tuple[LogitsRule, ...]:
        return self.prompts.rules(defaults, options)


ENCODER: type[EncoderSide] = WhisperAudioEncoder
DECODER: type[DecoderSide] = WhisperTextDecoder
