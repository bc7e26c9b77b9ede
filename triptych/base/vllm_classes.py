"""The classes that are served through vLLM, and what vLLM calls the parts of an item.

Of a class in the table the rows that our encoder workers save are those of vLLM's own encoder: a row for each
token of the placeholder that takes one, in the order of the tokens, with a column block for each DeepStack
level after the first. Each has a conformance test in tests/with_vllm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.base.errors import ConfigError

#: Fields of a vLLM item that hold its patch grid (frames, rows, columns), which decides positions.
GRIDS = ("image_grid_thw", "video_grid_thw")
#: The field of an item without media and grid: vLLM 0.32 ends its engine on an item without fields.
ROWS = "rows"
#: The field of a video whose positions in time are seconds: those between two rows of its grid.
SECONDS = "second_per_grid_ts"


@dataclass(frozen=True, slots=True)
class VLLMClass:
    """One class.

    `saved_by_vllm`: a producer's plans are those of our encoder workers; other plans hold the placeholder's
    tokens, which the connector is not told. `pooled`: embeddings and scores with pictures are tested.
    `modalities` are those of its items. `segments`: positions of a video are those of each frame, so that
    each of its segments is an item of vLLM's. `image_kind` is vLLM's own name of the kind of pictures.
    `not_run`: why rows and answers were not compared; such a class is tried at each start.
    """

    saved_by_vllm: bool = False
    pooled: bool = False
    modalities: tuple[str, ...] = ("image",)
    segments: bool = False
    image_kind: str = "image"
    not_run: str = ""


_BY_REMOTE_CODE = "vLLM 0.32 reads its config.json with the hub's own code alone"
_KIMI = VLLMClass(
    image_kind="vision_chunk",
    not_run="vLLM 0.32 ends with it on CPUs (\"'_lib_fn_wrapper' object has no attribute 'get'\")",
)
_VIDEO = ("image", "video")
_FRAMES = VLLMClass(modalities=_VIDEO, segments=True)
#: By the architecture in config.json, which vLLM looks its models up by, too.
CLASSES = {
    "Qwen3VLForConditionalGeneration": replace(_FRAMES, saved_by_vllm=True, pooled=True),
    "Qwen2_5_VLForConditionalGeneration": VLLMClass(saved_by_vllm=True, modalities=_VIDEO),
    "LlavaForConditionalGeneration": VLLMClass(saved_by_vllm=True),
    "Qwen3VLMoeForConditionalGeneration": _FRAMES,
    "Qwen2VLForConditionalGeneration": VLLMClass(modalities=_VIDEO),
    "Qwen3_5ForConditionalGeneration": _FRAMES,
    "Qwen3_5MoeForConditionalGeneration": _FRAMES,
    "Glm4vForConditionalGeneration": _FRAMES,
    "Glm4vMoeForConditionalGeneration": _FRAMES,
    "InternVLForConditionalGeneration": VLLMClass(),
    "Gemma3ForConditionalGeneration": VLLMClass(),
    "Gemma4ForConditionalGeneration": VLLMClass(),
    "SmolVLMForConditionalGeneration": VLLMClass(),
    "Qwen2AudioForConditionalGeneration": VLLMClass(modalities=("audio",)),
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "Step3p7ForConditionalGeneration": VLLMClass(
        not_run=f"{_BY_REMOTE_CODE} (\"'Step3p7VisionConfig' object has no attribute 'width'\")"
    ),
    "MiniMaxM3SparseForConditionalGeneration": VLLMClass(
        not_run='vLLM 0.32 has it on GPUs alone ("No Unquantized MoE backend supports the deployment '
        'configuration.")'
    ),
}

#: Classes that vLLM 0.32 has, of which no config.json serves it and our encoder workers: why, in its words.
NOT_SERVED = {
    "Ernie4_5_VLMoeForConditionalGeneration": f"{_BY_REMOTE_CODE} (\"'Ernie4_5_VLMoeConfig' object has no "
    "attribute 'spatial_conv_size'\")",
}
#: What is known of a class that is tried: its pictures, whose rows are compared in number alone.
GENERIC = VLLMClass(not_run="it is not in the table")


def class_of(architecture: str, *, generic: bool = False) -> VLLMClass:
    """The class; ConfigError, naming it and the remedy, for one that is not in the table.

    With `generic` one that is not there is tried: `--engine-class generic`.
    """
    # vLLM's own name of a class whose head gives a score.
    known = CLASSES.get(architecture.replace("ForSequenceClassification", "ForConditionalGeneration"))
    if known is None and generic:
        return GENERIC
    if why := NOT_SERVED.get(architecture):
        raise ConfigError(
            f"{architecture} is not served through vLLM, since {why}: its rows were not compared. Use "
            "`triptych pd --engine native` for it"
        )
    if known is None:
        raise ConfigError(
            f"{architecture} is not served through vLLM: use `triptych pd --engine native` for it, or vLLM "
            f"without TriptychECConnector; through vLLM are served {', '.join(CLASSES)}. Another one is "
            "tried with `--engine-class generic`, or added with the row "
            f'`"{architecture}": VLLMClass(),` in triptych/base/vllm_classes.py and `make test-vllm` '
            "(docs/vllm.md, Another class)"
        )
    return known
