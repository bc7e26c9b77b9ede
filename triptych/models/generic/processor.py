"""The checkpoint's own processor: an item's tensors, and the tokens that stand for it; pictures by PIL."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

from triptych.base.errors import ConfigError, InvalidRequest, TooLarge, reason_of
from triptych.base.types import JsonObject, Options
from triptych.models.audio import AudioFile, Silence
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.folder import (
    SETTINGS_FILES,
    check_vocabulary,
    read_config,
    read_json,
    rewrites_prompt,
)
from triptych.models.checkpoint.processor_libraries import lacking_library
from triptych.models.generic.options import ProcessorOptions
from triptych.models.images import (
    check_resized,
    load_image_processor,
    processor_identity,
)
from triptych.models.level_steps import on_levels
from triptych.models.video.clip import SAMPLING, Clip, check_sampling, sampled_indices
from triptych.models.video.loading import load_video_processor, video_settings

logger = logging.getLogger(__name__)

#: Voxtral's method that makes features of a file, window by window.
_BY_WINDOWS = "_retrieve_input_features"
#: Omni's options that put a clip's sound between its frames.
_HEARD = {"use_audio_in_video", "load_audio_from_video"}


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """One picture, video or sound as the processor prepares it.

    `tokens` begin and end with tokens that no text merges with; `head` and `tail` are ordinary tokens before
    and after them, which are text of the prompt. `types` has each token's types.
    """

    head: tuple[int, ...]
    tokens: tuple[int, ...]
    tail: tuple[int, ...]
    types: tuple[tuple[int, ...], ...]
    tensors: dict[str, torch.Tensor]
    #: Seconds of a sound.
    seconds: float = 0.0


def processor_settings(path: Path) -> JsonObject:
    """All settings that decide an item's tensors, for the namespace; ConfigError where there are none."""
    settings = {name: value for name in SETTINGS_FILES if (value := read_json(path / name)) is not None}
    if settings and (videos := video_settings(path)):
        settings["video"] = videos
    if not settings:
        raise ConfigError(f"MODEL={path} has no processor: give MODEL=/folder with preprocessor_config.json")
    identity = processor_identity(settings)
    if is_torchvision_available() and not any(map(_is_on_pil, settings.values())):
        identity["torchvision"] = importlib.metadata.version("torchvision")
    if any(map(has_extractor, settings.values())):
        identity |= {name: importlib.metadata.version(name) for name in ("soundfile", "soxr")}
    return identity


def _is_on_pil(settings: JsonObject) -> bool:
    """Whether transformers has the image processor that a file names on PIL, which is then taken."""
    named = {**settings, **settings.get("image_processor", {})}.get("image_processor_type")
    return isinstance(named, str) and hasattr(transformers, f"{named.removesuffix('Fast')}Pil")


class GenericProcessor:
    """One checkpoint's processor. ConfigError for one that cannot be built, or not item by item.

    `token_ids` are the placeholders' tokens by modality.
    """

    def __init__(self, path: Path, token_ids: Mapping[str, int], type_names: Sequence[str]) -> None:
        self._processor = _load(path)
        self._tokenizer = self._processor.tokenizer
        self._type_names = type_names
        self._token, self._sound_token = (
            getattr(self._processor, f"{each}_token", None)
            or self._tokenizer.convert_ids_to_tokens(token_ids[each])
            if each in token_ids
            else ""
            for each in ("image", "audio")
        )
        self._video_token = getattr(self._processor, "video_token", None)
        #: Tokens of the chat template around a video: GLM-4V's processor looks for them to tell its rows.
        ids = [getattr(self._processor, f"video_{each}_id", None) for each in ("start", "end")]
        self._video_fence = ("", "") if None in ids else self._tokenizer.convert_ids_to_tokens(ids)
        # Added tokens of blanks merge: Gemma's tokenizer has one for each number of newlines.
        added = self._tokenizer.added_tokens_decoder.items()
        fixed = {index for index, token in added if token.special or token.content.strip()}
        self._merged_never = {*fixed, *self._tokenizer.all_special_ids}
        self._extractor: Any = getattr(self._processor, "feature_extractor", None)
        pictures = getattr(self._processor, "image_processor", None)
        if pictures is None:
            self._sound_rows = _rows_of_windows(path) if hasattr(self._processor, _BY_WINDOWS) else 0
            self._sound_id = token_ids["audio"]
            self._check_sound(path)
        else:
            self._sizes = self._check_alone(path) if self._expands else {}
            defaults = self._defaults("images")
            self._options = ProcessorOptions(pictures, defaults)
            self._size = defaults.get("size") or getattr(pictures, "size", None)
        self._videos = getattr(self._processor, "video_processor", None)
        if self._videos is not None:
            self._video_options = ProcessorOptions(self._videos, self._defaults("videos"))

    def _defaults(self, kind: str) -> Options:
        """The settings that the processor gives its part for this kind."""
        return getattr(self._processor, f"{kind}_kwargs", {})

    def __call__(self, image: Image.Image, options: Options) -> ProcessedItem:
        """InvalidRequest for a picture or options that the processor or the tower refuses."""
        self._options.check(options)
        check_resized(image, options, self._size)
        try:
            inputs = self._run(self._token, [image], options)
        except (ValueError, TypeError, ZeroDivisionError, OverflowError, RuntimeError) as error:
            param = "mm_processor_kwargs" if options else "image"
            raise InvalidRequest(f"the image cannot be processed: {error}", param=param) from error
        if options and not self._sizes.items() <= _sizes(inputs).items():
            sizes = ", ".join("{1}x{0}".format(*size) for size in self._sizes.values())
            raise InvalidRequest(
                f"the options give pictures of another size than this model takes ({sizes})",
                param="mm_processor_kwargs",
            )
        return self._item(inputs)

    def video(self, clip: Clip, options: Options, part: slice = slice(None)) -> ProcessedItem:
        """A video, or this part of its sampled frames as a video of its own.

        InvalidRequest for a video or options that the processor or the tower refuses.
        """
        if self._videos is None or not isinstance(self._video_token, str):
            raise InvalidRequest("video: this model takes no videos: send pictures", param="video")
        if heard := sorted(_HEARD & options.keys()):
            raise InvalidRequest(
                f"mm_processor_kwargs {heard[0]!r}: a clip's sound is not mixed with its frames: send it "
                "beside the clip, as an audio_url with the clip's own URL",
                param=f"mm_processor_kwargs.{heard[0]}",
            )
        check_sampling(self._videos, options)
        shaping = {name: value for name, value in options.items() if name not in SAMPLING}
        self._video_options.check(shaping)
        info = clip.info
        metadata = VideoMetadata(
            info.frames, info.fps, info.width, info.height, info.frames / info.fps, video_backend="pyav"
        )
        try:
            indices = sampled_indices(self._videos, metadata, self._defaults("videos"), options)[part]
            metadata.frames_indices = indices
            given = {"video_metadata": [metadata], "do_sample_frames": False, "return_metadata": True}
            if "fps" in options and hasattr(self._processor, "position_id_per_seconds"):
                given["fps"] = options["fps"]  # what Omni's processors count a grid's seconds by
            inputs = self._call(
                self._video_token.join(self._video_fence),
                videos=[clip.frames(indices)],
                videos_kwargs={**shaping, **given, "input_data_format": "channels_last"},
            )
        except InvalidRequest:
            raise
        except (ValueError, TypeError, ZeroDivisionError, OverflowError, RuntimeError) as error:
            param = "mm_processor_kwargs" if options else "video"
            raise InvalidRequest(f"the video cannot be processed: {error}", param=param) from error
        inputs.pop("video_metadata", None)
        if any(self._video_fence):
            inputs |= {
                name: inputs[name][:, 1:-1] for name in ("input_ids", "attention_mask", *self._type_names)
            }
        return self._item(inputs)

    def sound(self, audio: AudioFile, options: Options) -> ProcessedItem:
        """InvalidRequest for a file or options that the processor or the tower refuses."""
        if self._extractor is None:
            raise InvalidRequest(
                "audio: this model's folder has no feature extractor: send text", param="audio"
            )
        if options:
            raise InvalidRequest("mm_processor_kwargs: sound takes no options", param="mm_processor_kwargs")
        rate = int(self._extractor.sampling_rate)
        waveform = audio.waveform(rate)
        limit = self._max_samples()
        if limit and len(waveform) > limit:
            raise TooLarge(
                f"audio: longer than the {limit / rate:g} s that this model hears at once; send it in parts",
                param="audio",
            )
        try:
            item = self._item(self._heard(waveform, rate))
        except (ValueError, TypeError, ZeroDivisionError, OverflowError, RuntimeError) as error:
            raise InvalidRequest(f"audio: it cannot be processed: {error}", param="audio") from error
        if not item.tokens:
            raise InvalidRequest("audio: too short to be heard; send a longer file", param="audio")
        return replace(item, seconds=len(waveform) / rate)

    def _max_samples(self) -> int:
        """What is not cut off; 0 where the processor divides long files into windows."""
        if (seconds := getattr(self._processor, "max_audio_len", None)) is not None:
            return int(seconds * self._extractor.sampling_rate)
        named = inspect.signature(type(self._extractor).__call__).parameters.get("max_length")
        cuts = self._defaults("audio").get("truncation", True)
        return int(getattr(self._extractor, "n_samples", getattr(named, "default", 0)) or 0) if cuts else 0

    def _heard(self, waveform: np.ndarray, rate: int, text: str = "") -> dict[str, Any]:
        """The processor's output of a sound with this text after it."""
        if not hasattr(self._processor, _BY_WINDOWS):
            prompt, rates = f"{self._sound_token}{text}", {"sampling_rate": rate}
            return self._call(prompt, audio=[waveform], audio_kwargs=rates)
        # Voxtral's processor takes sounds through mistral-common only, which writes the same tokens.
        given = dict(self._defaults("audio"))
        length = given.pop("max_source_positions")
        features = getattr(self._processor, _BY_WINDOWS)([waveform], length, **given)
        ids = [self._sound_id] * (self._sound_rows * len(features))
        return {"input_ids": torch.tensor([ids]), "input_features": features}

    def _check_sound(self, path: Path) -> None:
        """ConfigError for a processor that takes no sound, or rewrites the text beside it."""
        try:
            if self._extractor is None:
                raise ValueError("it has no feature extractor: preprocessor_config.json is missing")
            sound = Silence().waveform(int(self._extractor.sampling_rate))
            alone = self._heard(sound, self._extractor.sampling_rate)["input_ids"][0].tolist()
            text = self._tokenizer("x", add_special_tokens=False)["input_ids"]
            if not self._sound_rows:
                beside = self._heard(sound, self._extractor.sampling_rate, "x")["input_ids"][0].tolist()
                if beside != [*alone, *text]:
                    raise ValueError("it rewrites the prompt around sounds")
        except Exception as error:  # of any kind: code of the class
            reason = reason_of(error)
            raise ConfigError(f"MODEL={path}: its processor does not take a sound ({reason})") from error

    @property
    def frames_per_unit(self) -> int:
        """Frames of a video that become one of the tower's."""
        return int(getattr(self._videos, "temporal_patch_size", None) or 1)

    def video_size(self, options: Options) -> dict[str, int]:
        """The limits of a video's pixels by the options, or else the checkpoint; empty where it has none."""
        size = (
            options.get("size") or self._defaults("videos").get("size") or getattr(self._videos, "size", None)
        )
        given = {side: value for side, value in dict(size or {}).items() if isinstance(value, int)}
        return given if given.keys() == {"shortest_edge", "longest_edge"} else {}

    def _item(self, inputs: dict[str, Any]) -> ProcessedItem:
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        zeros = torch.zeros(len(ids), dtype=torch.int64)
        types = [inputs.pop(name)[0] if name in inputs else zeros for name in self._type_names]
        fixed = [index for index, token in enumerate(ids) if token in self._merged_never]
        first, last = (fixed[0], fixed[-1] + 1) if fixed else (0, len(ids))
        kinds = torch.stack(types, dim=1).tolist() if types else [[]] * len(ids)
        return ProcessedItem(
            tuple(ids[:first]),
            tuple(ids[first:last]),
            tuple(ids[last:]),
            tuple(map(tuple, kinds[first:last])),
            {name: value for name, value in inputs.items() if torch.is_tensor(value)},
        )

    @property
    def _expands(self) -> bool:
        """Whether it writes pictures into a text; a retriever's puts words of its own around each one."""
        return not hasattr(self._processor, "visual_prompt_prefix")

    def _run(self, text: str, images: list[Image.Image], options: Options | None = None) -> dict[str, Any]:
        given: dict[str, Any] = {"images_kwargs": dict(options)} if options else {}
        if self._expands:
            return self._call(text, images=images, **given)
        inputs = dict(self._processor(images=images, return_tensors="pt", **given))
        # Padded to the patches of the largest picture, of which there is one.
        if (pixels := inputs["pixel_values"]).dim() == 3:
            inputs["pixel_values"] = pixels[0]
        return inputs

    def _call(self, text: str, **given: Any) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return dict(self._processor(text=[text], return_tensors="pt", add_special_tokens=False, **given))

    def _check_alone(self, path: Path) -> dict[str, tuple[int, ...]]:
        """The sizes that pictures of any form get; ConfigError where a prompt's are not expanded alone."""
        images = [Image.new("RGB", size, "grey") for size in ((64, 48), (48, 80))]
        try:
            outs = [self._run(self._token, [image]) for image in images]
            one, other = (out["input_ids"][0].tolist() for out in outs)
            beside = self._ids(f"{self._token}{self._token}", images)
            before = self._ids(f"{self._token}x", images[:1])
        except Exception as error:  # of any kind: code of the class
            reason = reason_of(error)
            raise ConfigError(f"MODEL={path}: its processor does not take a picture ({reason})") from error
        text = self._tokenizer("x", add_special_tokens=False)["input_ids"]
        merges = not {one[-1], other[0]} <= self._merged_never
        expected = [([*one, *other], beside), ([*one, *text], before)]
        if merges:  # Ordinary tokens at an end become others beside their neighbours.
            expected = [(self._fixed([*one, *other]), self._fixed(beside))]
        if any(alone != given for alone, given in expected):
            numbers = getattr(self._processor.image_processor, "use_image_id", False)
            raise rewrites_prompt(path, numbers=bool(numbers))
        return dict(_sizes(outs[0]).items() & _sizes(outs[1]).items())

    def _ids(self, text: str, images: list[Image.Image]) -> list[int]:
        ids: list[int] = self._run(text, images)["input_ids"][0].tolist()
        return ids

    def _fixed(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens that no text merges with."""
        return [token for token in token_ids if token in self._merged_never]


def _sizes(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Height and width of each tensor of pictures."""
    return {name: x.shape[-2:] for name, x in inputs.items() if torch.is_tensor(x) and x.dim() >= 4}


def _load(path: Path) -> Any:
    check_vocabulary(path)
    cls = _class_of(path)
    parts: dict[str, Callable[[], Any]] = {
        "image_processor": lambda: on_levels(load_image_processor(path)),
        "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        ),
        "video_processor": lambda: _video_processor(path),
        "feature_extractor": lambda: _feature_extractor(path),
    }
    # A processor of pictures works without one of videos or sounds.
    relaxed = type(
        cls.__name__, (cls,), {"check_argument_for_proper_class": _check, "__module__": cls.__module__}
    )
    try:
        settings, _ = cls.get_processor_dict(path, local_files_only=True)
        arguments = [parts[name]() if name in parts else None for name in cls.get_attributes()]
        return relaxed.from_args_and_dict(arguments, settings)  # type: ignore[attr-defined]
    except ConfigError:
        raise
    except Exception as error:  # of any kind: code of the class
        reason = reason_of(error)
        raise ConfigError(f"MODEL={path}: its processor {cls.__name__} cannot be loaded: {reason}") from error


def _video_processor(path: Path) -> Any:
    """The checkpoint's, None where it has none: the model then takes pictures only."""
    try:
        return load_video_processor(path)
    except ConfigError as error:
        logger.warning("videos are refused: %s", error)
        return None


def has_extractor(settings: JsonObject) -> bool:
    """Whether a file of settings has those of a feature extractor."""
    return "feature_extractor" in settings or "feature_extractor_type" in settings


def _feature_extractor(path: Path) -> Any:
    """The checkpoint's, None where it has none: the model then takes no sound."""
    if not any(has_extractor(read_json(path / name) or {}) for name in SETTINGS_FILES):
        return None
    extractor = transformers.AutoFeatureExtractor.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    if getattr(extractor, "dither", 0):
        raise ConfigError(f"MODEL={path} dithers its audio: set dither to 0 in preprocessor_config.json")
    return extractor


def _rows_of_windows(path: Path) -> int:
    """Rows of one of Voxtral's windows: its tower halves the frames, its projector joins several."""
    tower: Any = load_config(path).audio_config
    return int(tower.max_source_positions * tower.hidden_size // tower.intermediate_size)


def _class_of(path: Path) -> Any:
    named = [
        (read_json(path / name) or {}).get("processor_class")
        for name in (*SETTINGS_FILES, "tokenizer_config.json")
    ]
    default = PROCESSOR_MAPPING_NAMES.get(read_config(path).get("model_type", ""))
    names = [name for name in (*named, default) if isinstance(name, str)]
    for name in names:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, ProcessorMixin):
            return cls
        # A stand-in that transformers has where a library is lacking: another class would take its place.
        if lacking := ", ".join(getattr(cls, "_backends", ())):
            raise lacking_library(path, "processor", name, lacking)
    raise ConfigError(
        f"MODEL={path}: transformers {transformers.__version__} has no processor for it here "
        f"({names[0] if names else 'none is named'}): it may need torchvision"
    )


def _check(self: Any, name: str, argument: object) -> type:
    """Accepts what it is given: a part that no picture needs may be missing."""
    return type(argument)
