"""What is served, what is refused, and why: of each class of transformers, and as a table."""

from __future__ import annotations

from transformers.models.auto import modeling_auto

from support.sounds.classes import SOUNDS
from support.zoo.checkpoint import own_processor
from support.zoo.models import ALL_RECIPES, RECIPES
from support.zoo.processors import ON_TORCHVISION
from support.zoo.recipe import Recipe
from triptych.models.checkpoint.refused_classes import LACKING, REFUSED

#: Recipes that the adapter refuses.
REFUSED_RECIPES = tuple(f"{family}ForConditionalGeneration" for family in ("Ovis2", "Chameleon"))

#: Classes that are not refused, and were not run here.
NOT_RUN = dict.fromkeys(
    ("GraniteSpeechPlusForConditionalGeneration", "MossTranscribeDiarizeForConditionalGeneration",
     "Nemotron3_5TranscribeForConditionalGeneration", "OmniASRForConditionalGeneration",
     "VibeVoiceAsrForConditionalGeneration"),
    "takes sound: not refused, but was not run here",
) | dict.fromkeys(
    ("DiffusionGemmaForBlockDiffusion", "FastVlmForConditionalGeneration", "Gemma3nForConditionalGeneration",
     "Granite4VisionForConditionalGeneration", "PerceptionLMForConditionalGeneration",
     "Qwen4ExpForConditionalGeneration"),
    "its default config is not complete, or needs the package timm",
) | {"VisionEncoderDecoderModel": "TrOCR has a family of its own"}  # fmt: skip
#: Classes without a recipe, and why.
WITHOUT_RECIPE = NOT_RUN | {
    name: refused.shown for name, refused in REFUSED.items() if name not in ALL_RECIPES
}

#: Classes that the pinned release of transformers lacks, with the first that has them.
NEWER = dict.fromkeys(
    ("Apertus1p5ForConditionalGeneration", "HYV4VLForConditionalGeneration",
     "Inkling2LoopForConditionalGeneration", "OmniASRForConditionalGeneration"),
    "5.24",
)  # fmt: skip
#: Models that users know and that transformers has no class of.
ABSENT = {
    "CogAgentForCausalLM": "CogAgent: transformers has no class of it, and remote code is never run",
    **LACKING,
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
    known = {recipe.architecture for recipe in ALL_RECIPES.values()} | set(WITHOUT_RECIPE)
    for architecture in sorted(known):
        recipes = [recipe for recipe in ALL_RECIPES.values() if recipe.architecture == architecture]
        notes = [REFUSED[recipe.name].shown for recipe in recipes if recipe.name in REFUSED_RECIPES]
        if not recipes:
            notes = [WITHOUT_RECIPE[architecture]]
        served = "no" if notes else "engine"
        if architecture.removesuffix("ForConditionalGeneration") in ON_TORCHVISION:
            served = "torchvision"
        elif architecture in HEARD or any(has_own_processor(recipe) for recipe in recipes):
            served = "yes"
        notes += ["sound"] * any(recipe.modality == "audio" for recipe in recipes)
        notes += ["sound beside pictures and videos"] * (architecture in HEARD and not notes)
        notes += ["one picture in a prompt"] * any(recipe.one_item for recipe in recipes)
        notes += [REFUSED[architecture].shown] if architecture in OWN_PROCESSOR_REFUSED else []
        notes += [NOTES[architecture]] if architecture in NOTES else []
        notes += [f"from transformers {NEWER[architecture]}"] if architecture in NEWER else []
        lines.append(f"| {architecture} | {served} | {'; '.join(notes)} |")
    lines += [f"| {name} | no | {reason} |" for name, reason in sorted(ABSENT.items())]
    return "\n".join(lines)
