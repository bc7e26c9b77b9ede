"""The architecture in config.json is refused by its name before torch or transformers is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import transformers

from triptych.base.errors import ConfigError
from triptych.models.checkpoint import architectures, refused_classes
from triptych.models.checkpoint.architectures import check_architecture
from triptych.models.checkpoint.refused_classes import LACKING, ON_TIMM, REFUSED
from triptych.models.registry import FAMILIES

ROOT = Path(__file__).parents[4]
FOLDER = Path("/models/mine")
#: The classes that docs/models.md lists; some of a newer transformers than the pinned one.
LISTED = set(re.findall(r"\b[A-Z]\w+For[A-Z]\w+", (ROOT / "docs" / "models.md").read_text(encoding="utf-8")))


def check(*architectures: str, **more: object) -> None:
    check_architecture(FOLDER, {"architectures": list(architectures), **more})


def test_every_family_and_every_listed_class_that_is_not_refused_is_taken() -> None:
    listed = (LISTED & set(dir(transformers))) - {*REFUSED, *ON_TIMM}
    assert len(listed) > 50
    for name in (*listed, *(family.architecture for family in FAMILIES)):
        check(name)


def test_a_class_that_no_mapping_names_and_a_config_without_a_name_are_left_to_the_loader() -> None:
    check("Ernie4_5_VL_MoeForConditionalGeneration")
    check_architecture(FOLDER, {"model_type": "qwen3_vl"})
    check_architecture(FOLDER, {"architectures": None})


def test_an_unknown_architecture_is_named_with_the_nearest_one() -> None:
    words = (
        r"MODEL=/models/mine is of an unknown architecture, Qwen4VLForConditionalGeneration \(the nearest "
        r"one is Qwen3VLForConditionalGeneration\): give one of the classes in docs/models\.md"
    )
    with pytest.raises(ConfigError, match=words):
        check("Qwen4VLForConditionalGeneration")
    with pytest.raises(ConfigError, match="unknown architecture, Zzz: give one"):
        check("Zzz")


def test_a_class_of_texts_alone_is_named_as_that_unless_the_checkpoint_has_other_parts() -> None:
    for name in ("Qwen2ForCausalLM", "LlamaForCausalLM"):
        with pytest.raises(ConfigError, match=f"{name} takes text alone: serve it with vLLM or SGLang"):
            check(name)
    check("Qwen2ForCausalLM", vision_config={})
    check("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration")


def test_a_class_that_no_worker_loads_is_named_with_the_reason_and_what_serves_it(monkeypatch) -> None:
    words = (
        r"^MODEL=/models/mine: MllamaForConditionalGeneration cannot be served \(attends to pictures within "
        r"its layers\): serve it with SGLang$"
    )
    with pytest.raises(ConfigError, match=words):
        check("MllamaForConditionalGeneration", vision_config={})
    # A release that came after the table may have what was missing: loading tells.
    monkeypatch.setattr(refused_classes, "version", lambda name: "5.99.0")
    check("MllamaForConditionalGeneration", vision_config={})


def test_a_tower_of_a_package_that_is_not_installed_is_named_with_the_package(monkeypatch) -> None:
    for found in (None, object()):
        monkeypatch.setattr(refused_classes, "find_spec", lambda name, found=found: found)
        for name in ON_TIMM:
            with nullcontext() if found else pytest.raises(ConfigError, match="needs the package timm"):
                check(name, vision_config={})


def test_an_installed_adapter_takes_a_class_that_is_refused_without_it(monkeypatch) -> None:
    monkeypatch.setattr(architectures, "entry_points", lambda **_: (object(),))
    check("Ovis2ForConditionalGeneration", vision_config={})


@pytest.mark.parametrize("command", ["serve", "encoder", "pd", "colocated"])
def test_a_service_says_so_in_its_only_line_and_starts_nothing(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    store = [] if command == "serve" else ["--store", "redis://127.0.0.1:1/0"]
    words = [sys.executable, "-m", "triptych.apps.cli", command, *store, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode and line.endswith(
        "Qwen2ForCausalLM takes text alone: serve it with vLLM or SGLang"
    )


def test_the_checks_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Mine"]}))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from triptych.base.config import EncoderConfig\n"
        "from triptych.base.errors import ConfigError\n"
        "from triptych.models.checkpoint.first_checks import check_encoder_model\n"
        "try:\n"
        f"    check_encoder_model(Path({str(tmp_path)!r}), EncoderConfig())\n"
        "except ConfigError as error:\n"
        "    print(error, sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "unknown architecture, Mine" in ended.stdout and ended.stdout.strip().endswith("[]")


@pytest.mark.parametrize("name", LACKING)
def test_a_class_that_transformers_lacks_is_named_with_what_is_served_instead(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"transformers has no class of it.*is served\): serve it with a vLLM"
    ):
        check(name)
