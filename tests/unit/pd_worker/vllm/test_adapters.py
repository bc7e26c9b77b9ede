"""LoRA adapters of --lora-modules: which are taken, by what key, and how others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from support.data.adapters import LANGUAGE, RANK, write_adapter
from support.data.checkpoints import build_checkpoint
from triptych.base.config import PDConfig
from triptych.base.config.flags import arguments
from triptych.base.errors import ConfigError
from triptych.pd_worker.vllm.adapters import (
    MAX_ADAPTERS,
    Adapter,
    check_server,
    lora_flags,
    parse_modules,
    read_adapters,
)
from triptych.pd_worker.vllm.connection import check_native


def config_of(family: str, *modules: str, **flags: object) -> PDConfig:
    model = str(build_checkpoint(family))
    return PDConfig(model=model, dtype="float32", engine="vllm", lora_modules=",".join(modules), **flags)


def test_names_and_folders_are_read_as_the_flag_gives_them() -> None:
    assert parse_modules("") == {}
    assert parse_modules("a=/x, b/2=/y=z") == {"a": Path("/x"), "b/2": Path("/y=z")}
    assert "--lora-modules" in arguments(PDConfig(lora_modules="a=/x"))


@pytest.mark.parametrize("text", ["a", "=/x", "a=", "a b=/x", "-a=/x", "ä=/x", f"{'n' * 129}=/x"])
def test_what_is_no_name_and_folder_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write NAME=DIR"):
        parse_modules(text)


def test_a_name_may_come_once_and_no_more_than_the_most_adapters() -> None:
    with pytest.raises(ConfigError, match="'a' twice"):
        parse_modules("a=/x,a=/y")
    with pytest.raises(ConfigError, match=f"at most {MAX_ADAPTERS}"):
        parse_modules(",".join(f"a{at}=/x" for at in range(MAX_ADAPTERS + 1)))


def test_the_models_own_name_is_no_adapters(tmp_path: Path) -> None:
    config = config_of("qwen3_vl", f"m={tmp_path}", served_model_name="m")
    with pytest.raises(ConfigError, match="'m' is the model's own name"):
        read_adapters(config)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_an_adapter_of_the_language_model_is_taken(family: str, tmp_path: Path) -> None:
    folder = write_adapter(build_checkpoint(family), tmp_path / "sql", 1)
    [adapter] = read_adapters(config_of(family, f"sql={folder}"))
    assert (adapter.name, adapter.path, adapter.rank) == ("sql", folder, RANK)


def test_a_key_is_of_model_weights_and_settings_and_not_of_the_folder(tmp_path: Path) -> None:
    base = build_checkpoint("qwen3_vl")
    folders = [
        write_adapter(base, tmp_path / "a", 1),
        write_adapter(base, tmp_path / "copy", 1),
        write_adapter(base, tmp_path / "other", 2),
        write_adapter(base, tmp_path / "settings", 1, lora_alpha=16.0),
    ]
    config = config_of("qwen3_vl", *(f"{folder.name}={folder}" for folder in folders))
    first, *others = (adapter.key for adapter in read_adapters(config))
    assert [key == first for key in others] == [True, False, False]
    again = read_adapters(replace(config, model_revision="2"))
    assert first not in {adapter.key for adapter in again}, "of another model key"


@pytest.mark.parametrize(
    ("family", "targets", "part"),
    [
        ("qwen3_vl", r"visual\.blocks\.0\.attn\.qkv\.weight$", "visual.blocks.0.attn.qkv"),
        ("qwen3_vl", r"visual\.merger\.linear_fc1\.weight$", "visual.merger.linear_fc1"),
        ("qwen3_vl", rf"visual\.merger\.linear_fc1\.weight$|{LANGUAGE}", "visual.merger.linear_fc1"),
        ("llava", r"multi_modal_projector\.linear_1\.weight$", "multi_modal_projector.linear_1"),
        ("llava", r"vision_tower\..*\.q_proj\.weight$", "vision_tower"),
    ],
)
def test_an_adapter_of_tower_or_projector_is_refused_by_name(family, targets, part, tmp_path) -> None:
    folder = write_adapter(build_checkpoint(family), tmp_path / "sees", 1, targets=targets)
    with pytest.raises(ConfigError, match=r"--lora-modules sees: .*tower or projector.*merge") as error:
        read_adapters(config_of(family, f"sees={folder}"))
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"bias": "all"}, "bias all"),
        ({"r": 1024}, "a rank that is not 1 to 512"),
        ({"r": "8"}, "a rank that is not"),
        ({"rank_pattern": {"q_proj": 0}}, "a rank that is not"),
        ({"rank_pattern": [1]}, "is not what PEFT writes"),
    ],
)
def test_a_kind_of_adapter_that_vllm_does_not_apply_is_refused_by_name(changes, reason, tmp_path) -> None:
    folder = write_adapter(build_checkpoint("qwen3_vl"), tmp_path / "a", 1, **changes)
    with pytest.raises(ConfigError, match=rf"--lora-modules a: .*{reason}"):
        read_adapters(config_of("qwen3_vl", f"a={folder}"))


def test_a_folder_that_is_no_adapter_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_adapter(build_checkpoint("qwen3_vl"), tmp_path / "a", 1)
    weights = folder / "adapter_model.safetensors"
    config = config_of("qwen3_vl", f"a={folder}")

    def refusal() -> str:
        with pytest.raises(ConfigError, match="--lora-modules a: ") as error:
            read_adapters(config)
        return str(error.value)

    tensors = load_file(weights)
    save_file(
        tensors | {"base_model.model.model.language_model.embed_tokens.weight": tensors.popitem()[1]}, weights
    )
    assert "is no LoRA of a linear layer" in refusal()
    save_file({}, weights)
    assert "has no tensors" in refusal()
    weights.write_bytes(b"12345678{")
    assert "is damaged" in refusal()
    weights.rename(folder / "adapter_model.bin")
    assert "pickled files are never read" in refusal()
    (folder / "adapter_config.json").unlink()
    assert "save_pretrained" in refusal()


def test_an_adapter_of_the_head_is_refused_where_the_model_gives_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = build_checkpoint("qwen3_vl")
    layers = write_adapter(checkpoint, tmp_path / "layers", 1)
    head = write_adapter(checkpoint, tmp_path / "head", 1, targets=r"embed_tokens\.weight$")
    file = head / "adapter_model.safetensors"
    renamed = {
        f"base_model.model.lm_head.{key.split('.')[-2]}.weight": t for key, t in load_file(file).items()
    }
    save_file(renamed, file)
    config = config_of("qwen3_vl", f"a={layers},b={head}")
    assert [adapter.name for adapter in read_adapters(config)] == ["a", "b"]
    monkeypatch.setattr("triptych.pd_worker.vllm.adapters.read_task", lambda path: "score")
    with pytest.raises(ConfigError, match=r"--lora-modules b: .*lm_head.* is of the head, .* merge it"):
        read_adapters(config)


def test_vllm_is_given_their_folders_their_number_and_a_rank_that_it_has() -> None:
    adapters = [Adapter(f"a{at}", Path(f"/x, y/{at}"), rank, "k") for at, rank in enumerate([4, 33, 8, 8, 8])]
    words = lora_flags(adapters, "cuda")
    value = {flag: words[words.index(flag) + 1] for flag in words if flag.startswith("--max")}
    assert value == {"--max-lora-rank": "64", "--max-loras": "4", "--max-cpu-loras": "5"}
    given = [json.loads(word) for word in words[words.index("--lora-modules") + 1 :]]
    assert given == [{"name": adapter.name, "path": str(adapter.path)} for adapter in adapters]
    assert lora_flags([], "cuda") == []


def test_on_a_cpu_vllms_last_place_stays_empty() -> None:
    """vLLM 0.32 gives requests without an adapter what is there."""
    words = lora_flags([Adapter("a", Path("/a"), 8, "k"), Adapter("b", Path("/b"), 8, "l")], "cpu")
    assert [words[words.index(flag) + 1] for flag in ("--max-loras", "--max-cpu-loras")] == ["3", "3"]


def test_a_server_elsewhere_has_to_list_them() -> None:
    adapters = [Adapter("a", Path("/a"), 8, "k"), Adapter("b", Path("/b"), 8, "l")]
    check_server(adapters, ["b", "c", "a"], "cpu")
    with pytest.raises(ConfigError, match=r"--lora-modules b: .*start it with --enable-lora"):
        check_server(adapters, ["a"], "cpu")


def test_the_native_engine_refuses_them_by_name() -> None:
    with pytest.raises(ConfigError, match="--lora-modules is for --engine vllm: .*merge"):
        check_native(PDConfig(lora_modules="a=/x"))
