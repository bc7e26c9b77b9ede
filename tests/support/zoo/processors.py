"""Processors of the classes themselves, on PIL and without a hub: the table, and a tokenizer made in code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from support.zoo.recipe import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    BOS,
    BREAK,
    END,
    EOS,
    FIRST_BYTE,
    IMAGE,
    PAD,
    START,
    VIDEO,
    VOCAB_SIZE,
    Config,
)
from support.zoo.torchvision import TORCHVISION

#: Special tokens by id: what most processors write; the bytes are ordinary tokens.
_STRINGS = {
    PAD: "<pad>", BOS: "<s>", EOS: "</s>", IMAGE: "<image>", VIDEO: "<|video|>", AUDIO: "<|audio|>",
    START: "<|vision_start|>", END: "<|vision_end|>", BREAK: "[IMG_BREAK]", AUDIO_START: "<|begin_of_video|>",
    AUDIO_END: "<|end_of_video|>", 300: "<fake_token_around_image>", 301: "<global-img>",
    302: "<row_1_col_1>",
    303: "<img>", 304: "<pre>", 305: "</img>", 306: "<row>", 307: "<col>", 308: "<end_of_utterance>",
}  # fmt: skip
#: The names under which processors ask a tokenizer for special tokens.
_ATTRIBUTES = {
    IMAGE: ("image_token", "context_image_token"),
    VIDEO: ("video_token",),
    AUDIO: ("audio_token",),
    START: ("boi_token", "vision_start_token", "image_start_token", "start_image_token", "vision_bos_token"),
    END: ("eoi_token", "vision_end_token", "image_end_token", "end_image_token", "vision_eos_token"),
    BREAK: ("image_break_token", "img_line_break_token"),
    AUDIO_START: ("boa_token", "video_start_token", "audio_bos_token"),
    AUDIO_END: ("eoa_token", "video_end_token", "audio_eos_token"),
    300: ("image_boundary_token",),
    303: ("slice_start_token",),
    305: ("slice_end_token",),
    306: ("image_id_start_token",),
    307: ("image_id_end_token",),
}
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'PICTURE' }}"
    "{% elif part['type'] == 'video' %}{{ 'CLIP' }}"
    "{% elif part['type'] == 'audio' %}{{ '<|begin_of_video|><|audio|><|end_of_video|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class OwnProcessor:
    """How a class's processor is built: names of its classes, settings, and what its tokenizer lacks.

    `picture` is what the chat template writes for a picture; `strings` are special tokens of other names.
    """

    processor: str
    image_processor: str
    settings: Config
    options: Config = field(default_factory=dict)
    picture: str = "<image>"
    strings: Mapping[int, str] = field(default_factory=dict)

    @property
    def clip(self) -> str:
        """What the chat template writes for a video: the same as for a picture, with the other token."""
        if self.processor.startswith("Glm4"):
            return "<|begin_of_video|><|video|><|end_of_video|>"
        strings = {**_STRINGS, **self.strings}
        return self.picture.replace(strings[IMAGE], strings[VIDEO])


def make_tokenizer(own: OwnProcessor) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and special tokens at the end."""
    strings = {**_STRINGS, **own.strings}
    vocab = {text: index for index, text in strings.items()}
    vocab |= {text: FIRST_BYTE + n for n, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<|unused_{n}|>": n for n in range(VOCAB_SIZE) if n not in vocab.values()}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(text, special=bool(text.strip()), normalized=False) for text in strings.values()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        model_max_length=2048,
        extra_special_tokens={name: strings[n] for n, names in _ATTRIBUTES.items() for name in names},
        chat_template=_TEMPLATE.replace("PICTURE", own.picture).replace("CLIP", own.clip),
    )  # fmt: skip


def make_processor(own: OwnProcessor) -> ProcessorMixin:
    """The processor, without the parts for video and sound."""
    cls = getattr(transformers, own.processor)
    names = inspect.signature(cls.__init__).parameters
    tokenizer = make_tokenizer(own)
    images = getattr(transformers, own.image_processor)(**own.settings)
    parts = {
        "image_processor": images,
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
        # MiniCPM-V reads settings of it, which are those of pictures here.
        "video_processor": images if "MiniCPM" in own.processor else None,
        "feature_extractor": None,
    }
    with without_video():
        processor: ProcessorMixin = cls(
            **{name: part for name, part in parts.items() if name in names}, **own.options
        )
    return processor


@contextmanager
def without_video() -> Iterator[None]:
    """Processors take None for the parts that need torchvision."""
    check = ProcessorMixin.check_argument_for_proper_class

    def lenient(self: ProcessorMixin, name: str, argument: Any) -> Any:
        return (
            type(argument) if name == "video_processor" or argument is None else check(self, name, argument)
        )

    ProcessorMixin.check_argument_for_proper_class = lenient
    try:
        yield
    finally:
        ProcessorMixin.check_argument_for_proper_class = check


# fmt: off
_QWEN_SETTINGS = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1024},
}
_STILL_SETTINGS = {**_QWEN_SETTINGS, "temporal_patch_size": 1}
_SQUARE = {"size": {"height": 16, "width": 16}}
_CROPPED = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
_PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_PIXTRAL = {"size": {"longest_edge": 32}, "patch_size": 8}
_TILED = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_CROPS = {**_SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_SLICED = {"scale_resolution": 16, "patch_size": 4, "max_slice_nums": 4, "use_image_id": False}
_BETWEEN = "<|vision_start|><image><|vision_end|>"
_PATCH = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}


def _qwen(processor: str, image_processor: str = "Qwen2VLImageProcessorPil", **settings: Any) -> OwnProcessor:
    return OwnProcessor(processor, image_processor, {**_QWEN_SETTINGS, **settings}, picture=_BETWEEN)


PROCESSORS = {
    "Llava": OwnProcessor("LlavaProcessor", "LlavaImageProcessorPil", _CROPPED, _PATCH),
    "VipLlava": OwnProcessor("LlavaProcessor", "CLIPImageProcessorPil", _CROPPED, _PATCH),
    "LlavaNext": OwnProcessor("LlavaNextProcessor", "LlavaNextImageProcessorPil",
                              {**_CROPPED, **_PINPOINTS}, _PATCH),
    "LlavaNextVideo": OwnProcessor("LlavaNextVideoProcessor", "LlavaNextImageProcessorPil",
                                   {**_CROPPED, **_PINPOINTS}, _PATCH),
    "LlavaOnevision": OwnProcessor("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessorPil",
                                   {**_SQUARE, **_PINPOINTS},
                                   {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}),
    "InternVL": OwnProcessor("InternVLProcessor", "GotOcr2ImageProcessorPil", _CROPS,
                             {"image_seq_length": 4}),
    "QianfanOCR": OwnProcessor("QianfanOCRProcessor", "GotOcr2ImageProcessorPil", _CROPS,
                               {"image_seq_length": 4}),
    "Idefics3": OwnProcessor("Idefics3Processor", "Idefics3ImageProcessorPil", _TILED, {"image_seq_len": 4}),
    "SmolVLM": OwnProcessor("SmolVLMProcessor", "SmolVLMImageProcessorPil", _TILED, {"image_seq_len": 4}),
    "Idefics2": OwnProcessor("Idefics2Processor", "Idefics2ImageProcessorPil",
                             {"size": {"shortest_edge": 16, "longest_edge": 16}, "do_image_splitting": False},
                             {"image_seq_len": 4}),
    "LightOnOcr": OwnProcessor("LightOnOcrProcessor", "PixtralImageProcessorPil", _PIXTRAL,
                               {"patch_size": 4, "spatial_merge_size": 2}),
    "AyaVision": OwnProcessor("AyaVisionProcessor", "GotOcr2ImageProcessorPil", _CROPS,
                              {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
                              strings={IMAGE: "<|IMG_PATCH|>", 309: "<image>"}),
    "Ovis2": OwnProcessor("Ovis2Processor", "Ovis2ImageProcessorPil", {**_SQUARE, "crop_to_patches": False},
                          {"image_seq_length": 4}, strings={IMAGE: "<IMG_ATOM>", 303: "<IMG_START>",
                                                            304: "<IMG_GRID>",
                                                            305: "<IMG_COL>", 306: "<IMG_ROW>",
                                                            307: "<IMG_END>",
                                                            309: "<image>"}),
    "Exaone4_5_": _qwen("Exaone4_5_Processor"),
    "VideoLlama3": OwnProcessor("VideoLlama3Processor", "VideoLlama3ImageProcessorPil",
                                {"patch_size": 4, "merge_size": 2, "size": _QWEN_SETTINGS["size"]}),
    "DeepseekVL": OwnProcessor("DeepseekVLProcessor", "DeepseekVLImageProcessorPil",
                               {**_SQUARE, "min_size": 4},
                               {"num_image_tokens": 16}),
    "DeepseekVLHybrid": OwnProcessor("DeepseekVLHybridProcessor", "DeepseekVLHybridImageProcessorPil",
                                     {**_SQUARE, "high_res_size": {"height": 64, "width": 64}, "min_size": 4},
                                     {"num_image_tokens": 16}),
    # Its tower asks 144 queries of a picture: as many tokens come of 64 pixels so.
    "DeepseekOcr2": OwnProcessor("DeepseekOcr2Processor", "DeepseekOcr2ImageProcessorPil",
                                 {"size": {"height": 64, "width": 64}, "tile_size": 64},
                                 {"patch_size": 2, "downsample_ratio": 2.75}),
    "MiniCPMV4_6": OwnProcessor("MiniCPMV4_6Processor", "MiniCPMV4_6ImageProcessorPil", _SLICED),
    "MiniCPMV4_7": OwnProcessor("MiniCPMV4_7Processor", "MiniCPMV4_6ImageProcessorPil", _SLICED),
    "Janus": OwnProcessor("JanusProcessor", "JanusImageProcessorPil", {**_SQUARE, "min_size": 4},
                          {"num_image_tokens": 16}),
    "HyperCLOVAXVisionV2": _qwen("HyperCLOVAXVisionV2Processor"),
    "Qwen3VL": _qwen("Qwen3VLProcessor"),
    "Qwen3VLMoe": _qwen("Qwen3VLProcessor"),
    "Cosmos3Omni": _qwen("Qwen3VLProcessor"),
    "Qwen2VL": _qwen("Qwen2VLProcessor"),
    "Qwen2_5_VL": _qwen("Qwen2_5_VLProcessor"),
    "Qwen3_5": _qwen("Qwen3VLProcessor"),
    "Qwen3_5Moe": _qwen("Qwen3VLProcessor"),
    "Lfm3Vl": _qwen("Lfm3VlProcessor"),
    "Glm4v": _qwen("Glm4vProcessor", "Glm4vImageProcessorPil"),
    "Glm4vMoe": _qwen("Glm4vProcessor", "Glm4vImageProcessorPil"),
    "Glm46V": _qwen("Glm46VProcessor", "Glm46VImageProcessorPil"),
    "GlmOcr": _qwen("Glm46VProcessor", "Glm46VImageProcessorPil"),
    "Ernie4_5_VLMoe": _qwen("Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeImageProcessorPil",
                            temporal_patch_size=1),
    "PaddleOCRVL": OwnProcessor("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessorPil", _STILL_SETTINGS,
                                picture=_BETWEEN),
    "HunYuanVL": OwnProcessor("HunYuanVLProcessor", "HunYuanVLImageProcessorPil", _STILL_SETTINGS,
                              picture=_BETWEEN),
    "CohereCompass": OwnProcessor("CohereCompassProcessor", "CohereCompassImageProcessorPil", _QWEN_SETTINGS,
                                  picture="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
                                  strings={IMAGE: "<|IMAGE_PAD|>", VIDEO: "<|VIDEO_PAD|>",
                                           START: "<|VISION_START|>", END: "<|VISION_END|>"}),
    "GraniteDocling": OwnProcessor("GraniteDoclingProcessor", "GraniteDoclingImageProcessorPil",
                                   {"size": {"height": 32, "width": 32},
                                    "max_image_size": {"height": 32, "width": 32}},
                                   {"image_seq_len": 4}),
    "Gemma3": OwnProcessor("Gemma3Processor", "Gemma3ImageProcessorPil", _SQUARE, {"image_seq_length": 4},
                           picture="<|vision_start|>"),
    "PaliGemma": OwnProcessor("PaliGemmaProcessor", "SiglipImageProcessorPil",
                              {**_SQUARE, "image_seq_length": 16}),
    "Gemma4": OwnProcessor("Gemma4Processor", "Gemma4ImageProcessorPil",
                           {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
}
#: Those that are on torchvision only.
ON_TORCHVISION = {name: OwnProcessor(*row) for name, row in TORCHVISION.items()}
