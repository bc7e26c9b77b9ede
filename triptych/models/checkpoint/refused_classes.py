"""The classes of transformers that no worker can load: why, and what serves each instead.

Loading finds the same by an examination on meta, seconds after processes have started. A row holds for the
releases that it was compared with (`tests/integration/zoo/test_classes.py`).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

#: The newest release of transformers that the rows were compared with.
_NEWEST = (5, 24)


class RefusedClass(NamedTuple):
    """Why a class is refused, and what to do."""

    reason: str
    instead: str

    @property
    def shown(self) -> str:
        """As a table has it."""
        return self.reason if self.instead == _NEITHER else f"{self.reason}: {self.instead}"


# By vLLM 0.32's and SGLang's lists of models.
_VLLM, _SGLANG = "serve it with vLLM", "serve it with SGLang"
_NEITHER = "neither vLLM nor SGLang lists it: transformers' generate runs it"
_LAYERS = "layers that keep a state or an index of their own"
_GETTER = "names no getter of a picture's features"
_CROSS = "not a decoder over one sequence of rows and tokens"
_SILENT = "names no getter of sound's features, or no token for them"
_PROMPT = "its rows depend on the prompt"
_REWRITES = "its processor rewrites the prompt around pictures"

REFUSED = {
    "BlipForConditionalGeneration": RefusedClass(_CROSS, _NEITHER),
    "ChameleonForConditionalGeneration": RefusedClass(
        "its decoder is the class that holds its encoder", _NEITHER
    ),
    "Dots3NoteForConditionalGeneration": RefusedClass(_LAYERS, _VLLM),
    "EvollaForProteinText2Text": RefusedClass(_GETTER, _NEITHER),
    "Florence2ForConditionalGeneration": RefusedClass(_CROSS, f"{_VLLM} and its bart-plugin"),
    "GitForCausalLM": RefusedClass(_GETTER, _NEITHER),
    "Glm5NextForConditionalGeneration": RefusedClass(_LAYERS, _VLLM),
    "HYV4VLForConditionalGeneration": RefusedClass(_LAYERS, _NEITHER),
    "HunYuanVLForConditionalGeneration": RefusedClass(_REWRITES, _VLLM),
    "Idefics2ForConditionalGeneration": RefusedClass(_REWRITES, _NEITHER),
    "IdeficsForVisionText2Text": RefusedClass(_GETTER, _NEITHER),
    "Inkling2ForConditionalGeneration": RefusedClass(_LAYERS, _NEITHER),
    "Inkling2LoopForConditionalGeneration": RefusedClass(_LAYERS, _NEITHER),
    "InklingForConditionalGeneration": RefusedClass(_LAYERS, _VLLM),
    "InstructBlipForConditionalGeneration": RefusedClass(_PROMPT, _NEITHER),
    "InstructBlipVideoForConditionalGeneration": RefusedClass(_GETTER, _NEITHER),
    "Kosmos2ForConditionalGeneration": RefusedClass(_GETTER, _NEITHER),
    "Kosmos2_5ForConditionalGeneration": RefusedClass(_GETTER, _NEITHER),
    "KyutaiSpeechToTextForConditionalGeneration": RefusedClass(_SILENT, _NEITHER),
    "Mistral4ForCausalLM": RefusedClass("takes text alone", "serve it with vLLM or SGLang"),
    "MistralLarge4ForConditionalGeneration": RefusedClass(_LAYERS, _NEITHER),
    "MllamaForConditionalGeneration": RefusedClass("attends to pictures within its layers", _SGLANG),
    "Molmo2ForConditionalGeneration": RefusedClass("adds rows to the tokens' own", _VLLM),
    "Ovis2ForConditionalGeneration": RefusedClass(
        "its rows have indicators beside them", "install the package in examples/model_package"
    ),
    "PI0ForConditionalGeneration": RefusedClass(_CROSS, _NEITHER),
    "PPFormulaNetForConditionalGeneration": RefusedClass(_CROSS, _NEITHER),
    "PaliGemmaForConditionalGeneration": RefusedClass(_REWRITES, _VLLM),
    "Phi4MultimodalForCausalLM": RefusedClass(_GETTER, f"{_VLLM}, in its form as Phi4MMForCausalLM"),
    "Pix2StructForConditionalGeneration": RefusedClass(_CROSS, _NEITHER),
    "Qwen2_5OmniForConditionalGeneration": RefusedClass("its thinker alone is served", _VLLM),
    "Qwen3OmniMoeForConditionalGeneration": RefusedClass("its thinker alone is served", _VLLM),
    "T5Gemma2ForConditionalGeneration": RefusedClass(_CROSS, _NEITHER),
    "UdopForConditionalGeneration": RefusedClass(_CROSS, _NEITHER),
    "UnlimitedOcrForConditionalGeneration": RefusedClass(
        _LAYERS, f"{_VLLM}, in its form as UnlimitedOCRForCausalLM"
    ),
    "VoxtralRealtimeForConditionalGeneration": RefusedClass(
        _SILENT, f"{_VLLM}, in its form as VoxtralRealtimeGeneration"
    ),
}


#: Classes of models that people serve, which transformers lacks: what stands in their place here.
LACKING = {
    "KimiVLForConditionalGeneration": "Kimi-VL: transformers has no class of it (Kimi K2.5 is served)",
    "MiniMaxVL01ForConditionalGeneration": "MiniMax-VL-01: transformers has no class of it, and vLLM none "
    "since 0.23 (MiniMax-M3 is served)",
    "Step3VLForConditionalGeneration": "Step3-VL: transformers has no class of it (Step-3.7 is served)",
    "StepVLForConditionalGeneration": "Step-VL: transformers has no class of it (Step-3.7 is served)",
}
#: Classes whose towers transformers makes of the package timm.
ON_TIMM = {
    "FastVlmForConditionalGeneration": _NEITHER,
    "Gemma3nForConditionalGeneration": _VLLM,
    "PerceptionLMForConditionalGeneration": _NEITHER,
}


def refused_class(name: str) -> RefusedClass | None:
    """The row of a class; None for one that is served, or whose release of transformers is not known yet."""
    if name in ON_TIMM and find_spec("timm") is None:
        return RefusedClass("its tower needs the package timm, which is not installed", ON_TIMM[name])
    try:
        installed = tuple(map(int, version("transformers").split(".")[:2]))
    except (PackageNotFoundError, ValueError):
        return None
    return REFUSED.get(name) if installed <= _NEWEST else None
