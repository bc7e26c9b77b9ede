"""What is served, what is refused, and why: of each class of transformers, and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.models.auto import modeling_auto

from support.sounds.classes import SOUNDS
from support.zoo.checkpoint import own_processor
from support.zoo.models import ALL_RECIPES, RECIPES
from support.zoo.processors import ON_TORCHVISION
from support.zoo.recipe import Recipe


@dataclass(frozen=True)
class Refusal:
    """`says` is part of the error with which the adapter refuses the class, `reason` the table's words."""

    says: str
    reason: str


_SOUND = Refusal("cannot be served", "takes sound: not refused, but was not run here")
_SILENT = Refusal("get_audio_features", "names no getter of sound's features, or no token for them")
_LAYERS = Refusal("has layers of type", "layers that keep a state or an index of their own")
_CROSS = Refusal("cannot be served", "not a decoder over one sequence of rows and tokens")
_GETTER = Refusal("has no get_image_features", "names no getter of a picture's features")
_BUILD = Refusal("describes no", "its default config is not complete, or needs the package timm")

#: Recipes that the adapter refuses.
REFUSED_RECIPES = {
    "Ovis2ForConditionalGeneration": Refusal(
        "visual_indicator_features", "by the package in examples/model_package"
    ),
    "ChameleonForConditionalGeneration": Refusal(
        "has no decoder beside its encoder", "its decoder is the class that holds its encoder"
    ),
}  # fmt: skip

#: Classes without a recipe.
REFUSED_CLASSES = {
    "BlipForConditionalGeneration": _CROSS,
    "DiffusionGemmaForBlockDiffusion": _BUILD,
    "Dots3NoteForConditionalGeneration": _LAYERS,
    "EvollaForProteinText2Text": _GETTER,
    "FastVlmForConditionalGeneration": _BUILD,
    "Florence2ForConditionalGeneration": _CROSS,
    "Gemma3nForConditionalGeneration": _BUILD,
    "GitForCausalLM": _GETTER,
    "Glm5NextForConditionalGeneration": _LAYERS,
    "Granite4VisionForConditionalGeneration": _BUILD,
    "HYV4VLForConditionalGeneration": _LAYERS,
    "GraniteSpeechPlusForConditionalGeneration": _SOUND,
    "IdeficsForVisionText2Text": _GETTER,
    "Inkling2ForConditionalGeneration": _LAYERS,
    "Inkling2LoopForConditionalGeneration": _LAYERS,
    "InklingForConditionalGeneration": _LAYERS,
    "InstructBlipForConditionalGeneration": Refusal("image_token_id", "its rows depend on the prompt"),
    "InstructBlipVideoForConditionalGeneration": _GETTER,
    "Kosmos2ForConditionalGeneration": _GETTER,
    "Kosmos2_5ForConditionalGeneration": _GETTER,
    "KyutaiSpeechToTextForConditionalGeneration": _SILENT,
    "Mistral4ForCausalLM": Refusal("has no get_image_features", "takes text alone"),
    "MistralLarge4ForConditionalGeneration": _LAYERS,
    "MllamaForConditionalGeneration": _GETTER,
    "Molmo2ForConditionalGeneration": Refusal("changes embeddings", "adds rows to the tokens' own"),
    "MossTranscribeDiarizeForConditionalGeneration": _SOUND,
    "Nemotron3_5TranscribeForConditionalGeneration": _LAYERS,
    "OmniASRForConditionalGeneration": _SOUND,
    "PI0ForConditionalGeneration": _CROSS,
    "PPFormulaNetForConditionalGeneration": _CROSS,
    "PerceptionLMForConditionalGeneration": _BUILD,
    "Phi4MultimodalForCausalLM": _GETTER,
    "Pix2StructForConditionalGeneration": _CROSS,
    "Qwen2_5OmniForConditionalGeneration": Refusal("has no decoder", "its thinker is served"),
    "Qwen3OmniMoeForConditionalGeneration": Refusal("describes no", "its thinker is served"),
    "Qwen4ExpForConditionalGeneration": _BUILD,
    "T5Gemma2ForConditionalGeneration": _CROSS,
    "UdopForConditionalGeneration": _CROSS,
    "UnlimitedOcrForConditionalGeneration": _LAYERS,
    "VibeVoiceAsrForConditionalGeneration": _SOUND,
    "VisionEncoderDecoderModel": Refusal("has no get_image_features", "TrOCR has a family of its own"),
    "VoxtralRealtimeForConditionalGeneration": _SILENT,
}  # fmt: skip

#: Classes that the pinned release of transformers lacks, with the first that has them.
NEWER = dict.fromkeys(
    ("Apertus1p5ForConditionalGeneration", "HYV4VLForConditionalGeneration",
     "Inkling2LoopForConditionalGeneration", "OmniASRForConditionalGeneration"),
    "5.24",
)  # fmt: skip
#: Models that users know and that transformers has no class of.
ABSENT = {
    "CogAgentForCausalLM": "CogAgent: transformers has no class of it, and remote code is never run",
    "Step3VLForConditionalGeneration": "Step3-VL: transformers has no class of it (Step-3.7 is served)",
}
SERVED = tuple(name for name in RECIPES if name not in REFUSED_RECIPES)
#: What a checkpoint's settings must say.
NOTES = dict.fromkeys(
    (f"MiniCPM{each}ForConditionalGeneration" for each in ("Ocr", "V4_6", "V4_7")),
    "with `use_image_id` false: else it numbers the pictures of a prompt, and is refused",
)
#: Served at the engine, but their processors are refused: a picture's tokens depend on the text around it.
OWN_PROCESSOR_REFUSED = tuple(
    f"{family}ForConditionalGeneration" for family in ("Idefics2", "HunYuanVL", "PaliGemma")
)


def has_own_processor(recipe: Recipe) -> bool:
    """Whether it is served from the picture on."""
    refused = recipe.name in REFUSED_RECIPES or recipe.name in OWN_PROCESSOR_REFUSED
    return own_processor(recipe) is not None and not refused


#: Served from the sound on: `tests/integration/zoo/test_sounds.py`.
HEARD = {entry.name for entry in SOUNDS}
OWN_PROCESSOR = tuple(name for name in SERVED if has_own_processor(RECIPES[name]))


def installed_classes() -> dict[str, str]:
    """The architectures of the installed transformers that take pictures or sound, with their model types."""
    found: dict[str, str] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    ):
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


def table() -> str:
    """The page's table, of the pinned release and newer ones."""
    lines = ["| class | served | why not, or what |", "| --- | --- | --- |"]
    known = {recipe.architecture for recipe in ALL_RECIPES.values()} | set(REFUSED_CLASSES)
    for architecture in sorted(known):
        recipes = [recipe for recipe in ALL_RECIPES.values() if recipe.architecture == architecture]
        refusals = [REFUSED_RECIPES[recipe.name] for recipe in recipes if recipe.name in REFUSED_RECIPES]
        if not recipes:
            refusals = [REFUSED_CLASSES[architecture]]
        served = "no" if refusals else "engine"
        if architecture.removesuffix("ForConditionalGeneration") in ON_TORCHVISION:
            served = "torchvision"
        elif architecture in HEARD or any(has_own_processor(recipe) for recipe in recipes):
            served = "yes"
        notes = [refusal.reason for refusal in refusals]
        notes += ["sound"] * any(recipe.modality == "audio" for recipe in recipes)
        notes += ["sound beside pictures and videos"] * (architecture in HEARD and not notes)
        notes += ["one picture in a prompt"] * any(recipe.one_item for recipe in recipes)
        notes += ["its processor is refused: it rewrites the prompt around pictures"] * (
            architecture in OWN_PROCESSOR_REFUSED
        )
        notes += [NOTES[architecture]] if architecture in NOTES else []
        notes += [f"from transformers {NEWER[architecture]}"] if architecture in NEWER else []
        lines.append(f"| {architecture} | {served} | {'; '.join(notes)} |")
    lines += [f"| {name} | no | {reason} |" for name, reason in sorted(ABSENT.items())]
    return "\n".join(lines)
