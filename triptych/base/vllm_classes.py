"""The classes that are served through vLLM, and what vLLM calls the parts of an item.

Of a class in the table the rows that our encoder workers save are those of vLLM's own encoder: a row for each
token of the placeholder that takes one, in the order of the tokens, with a column block for each DeepStack
level after the first. Each has a conformance test in tests/with_vllm.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.errors import ConfigError

#: Fields of a vLLM item that hold its patch grid (frames, rows, columns), which decides positions.
GRIDS = ("image_grid_thw", "video_grid_thw")
#: The field of an item without media and grid: vLLM 0.32 ends its engine on an item without fields.
ROWS = "rows"


@dataclass(frozen=True, slots=True)
class VLLMClass:
    """One class.

    `saved_by_vllm`: a producer's plans are those of our encoder workers; other plans hold the placeholder's
    tokens, which the connector is not told. `one_run`: an item's rows stand side by side in the prompt, as
    vLLM's endpoint for token ids wants them. `pooled`: embeddings and scores with pictures are tested.
    """

    saved_by_vllm: bool = False
    one_run: bool = True
    pooled: bool = False


#: By the architecture in config.json, which vLLM looks its models up by, too.
CLASSES = {
    "Qwen3VLForConditionalGeneration": VLLMClass(saved_by_vllm=True, pooled=True),
    "Qwen2_5_VLForConditionalGeneration": VLLMClass(saved_by_vllm=True),
    "LlavaForConditionalGeneration": VLLMClass(saved_by_vllm=True),
    "Qwen3VLMoeForConditionalGeneration": VLLMClass(),
    "Qwen2VLForConditionalGeneration": VLLMClass(),
    "Glm4vMoeForConditionalGeneration": VLLMClass(),
    "InternVLForConditionalGeneration": VLLMClass(),
    "Gemma3ForConditionalGeneration": VLLMClass(),
    "SmolVLMForConditionalGeneration": VLLMClass(one_run=False),
}


def class_of(architecture: str) -> VLLMClass:
    """The class; ConfigError, naming it and the remedy, for one that is not in the table."""
    # vLLM's own name of a class whose head gives a score.
    known = CLASSES.get(architecture.replace("ForSequenceClassification", "ForConditionalGeneration"))
    if known is None:
        raise ConfigError(
            f"{architecture} is not served through vLLM: use `triptych pd --engine native` for it, or vLLM "
            f"without TriptychECConnector; through vLLM are served {', '.join(CLASSES)}"
        )
    return known
