"""Folders of checkpoints: what they are, which are served, defaults of pooling."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from support.data.checkpoints import build_checkpoint, edit_config
from support.zoo.checkpoint import checkpoint as zoo_checkpoint
from triptych.apps.launch.model_path import resolve_model
from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.models.checkpoint import tensors
from triptych.models.checkpoint.architectures import check_architecture
from triptych.models.checkpoint.first_checks import check_encoder_model, check_pd_model
from triptych.models.checkpoint.folder import check_folder, given_template, read_config
from triptych.models.checkpoint.pooling import GENERATES, PoolingDefaults, read_pooling
from triptych.models.checkpoint.support import (
    MATRIX,
    check_supported,
    required_by_checkpoint,
    required_by_flags,
    table,
)
from triptych.models.checkpoint.tensors import Checkpoint, Cut
from triptych.models.registry import family_of, load_decoder


def test_a_folder_that_does_not_exist_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist: give MODEL=/folder with config\.json and"):
        family_of(tmp_path / "nowhere")


def test_a_folder_without_config_json_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: give MODEL=/folder"):
        Checkpoint(tmp_path)


def test_config_json_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(ConfigError, match="cannot be read"):
        Checkpoint(tmp_path)


def _rename(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("variant", "change", "words"),
    [
        (None, _rename, r"only pytorch_model\.bin, and pickles are never loaded"),
        (None, lambda path: (path / "model.safetensors").unlink(), "has no weights: give MODEL=/folder"),
        (
            "sharded",
            lambda path: (path / "model-00002-of-00003.safetensors").unlink(),
            r"lacks model-00002-of-00003\.safetensors",
        ),
    ],
    ids=["pickles", "no weights", "no shard"],
)
def test_weights_that_are_not_there_or_pickled_are_refused(variant, change, words, tmp_path):
    path = build_checkpoint("llava", tmp_path / "model", **({"variant": variant} if variant else {}))
    change(path)
    with pytest.raises(ConfigError, match=words):
        Checkpoint(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = build_checkpoint("llava", tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        Checkpoint(path)


@pytest.mark.parametrize("cut", [Cut(0, 16, 32, 64), Cut(1, 48, 64, 64)])
def test_of_a_cut_tensor_only_the_part_is_read(cut: Cut) -> None:
    key = "model.language_model.layers.0.self_attn.q_proj.weight"
    checkpoint = Checkpoint(build_checkpoint("llava"))
    [(_, whole)], [(_, part)] = checkpoint.read([key]), checkpoint.read([key], {key: cut})
    assert torch.equal(part, cut.of(whole))
    assert part.numel() == 16 * 64


def test_an_unknown_architecture_is_answered_with_where_the_served_ones_are(tmp_path: Path) -> None:
    path = build_checkpoint("llava", tmp_path / "model")
    edit_config(path, architectures=["GPT9ForCausalLM"])
    with pytest.raises(ConfigError, match=r"GPT9ForCausalLM.*one of the classes in docs/models\.md"):
        family_of(path)


def test_a_class_that_hubs_call_otherwise_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "kimi"
    shutil.copytree(zoo_checkpoint("Kimi_K25ForConditionalGeneration"), path)
    edit_config(path, architectures=["KimiK25ForConditionalGeneration"])
    check_architecture(path, read_config(path))
    assert family_of(path).architecture == "Kimi_K25ForConditionalGeneration"
    side = load_decoder(path, device=torch.device("cpu"), dtype=torch.float32, attn_implementation="sdpa")
    assert side.geometry.num_layers == 3


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_a_config_without_architectures_is_known_by_its_model_type(family: str, tmp_path: Path) -> None:
    path = edit_config(build_checkpoint(family, tmp_path / "model"), architectures=None)
    assert family_of(path).name == family


_MIB = 1 << 20
_TENSORS = 16


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """16 tensors of 1 MiB each, in one file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    tensors = {f"w{i:02}": torch.full((_MIB // 4,), float(i)) for i in range(_TENSORS)}
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


def resident(file: Path) -> int:
    """Bytes of `file` that are mapped and resident in this process (smaps)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            inside = line.endswith(str(file))
        elif inside and name == "Rss":
            total += int(rest.split()[0]) << 10
    return total


def test_files_are_mapped_anew_so_that_read_pages_do_not_stay(checkpoint, monkeypatch):
    monkeypatch.setattr(tensors, "MAPPED_BYTES", 2 * _MIB)
    file = checkpoint.path / "model.safetensors"
    maximum = 0
    for key, tensor in checkpoint.read(checkpoint.files):
        assert float(tensor.sum()) == int(key[1:]) * tensor.numel()
        maximum = max(maximum, resident(file))
    # Up to two MiB, the tensor read last, and what the kernel maps ahead.
    assert _MIB <= maximum <= 6 * _MIB


def test_parts_of_tensors_are_the_same_across_mappings(checkpoint, monkeypatch):
    monkeypatch.setattr(tensors, "MAPPED_BYTES", 1)
    whole = _MIB // 4
    cuts = {key: Cut(0, 8, 16, whole) for key in checkpoint.files}
    read = {key: part.tolist() for key, part in checkpoint.read(checkpoint.files, cuts)}
    assert read == {f"w{i:02}": [float(i)] * 8 for i in range(_TENSORS)}


ROOT = Path(__file__).parents[4]
PATH = Path("model")


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.name)
def test_a_row_is_served_or_raises_the_one_error_with_its_remedy(row) -> None:  # type: ignore[no-untyped-def]
    if row.served:
        check_supported(PATH, [row.name])
        return
    with pytest.raises(ConfigError, match="cannot be served") as refused:
        check_supported(PATH, [row.name])
    assert row.title in str(refused.value)
    assert str(refused.value).endswith(row.remedy)


def test_every_unserved_row_is_asked_for_by_a_flag_or_a_checkpoint() -> None:
    everything = PDConfig(
        tensor_parallel=2,
        pipeline_parallel=2,
        speculative_model="small",
        kv_cache_dtype="fp8",
        quantization="int8",
        device="cuda",
    )
    elsewhere = PDConfig(device="xpu")
    config = {"is_encoder_decoder": True, "sliding_window": 64}
    asked = {
        *required_by_flags(everything),
        *required_by_flags(elsewhere),
        *required_by_checkpoint(config, ["adapter_config.json"]),
    }
    refused = {row.name for row in MATRIX if not row.served}
    # Quantized decoders are found by their tensors (test_quantized.py); beam search is a warning.
    assert asked | {"quantization", "beam_search"} == refused | {"tensor_parallel", "int8"}


def test_the_page_has_the_table_of_the_code() -> None:
    page = (ROOT / "docs/engine.md").read_text()
    [shown] = re.findall(r"<!-- support -->\n\n(.*)\n\n<!-- /support -->", page, re.DOTALL)
    assert shown == table()


def test_every_test_named_in_the_table_exists() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", table())
    assert named
    assert not [path for path in named if not (ROOT / path).is_file()]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, []),
        ({"tensor_parallel": 2}, ["tensor_parallel"]),
        ({"pipeline_parallel": 2, "speculative_model": "small"}, ["pipeline_parallel", "speculative"]),
        ({"quantization": "int8"}, ["int8"]),
        ({"quantization": "int8-decoder", "device": "cuda:1"}, ["int8", "int8_cuda"]),
        ({"device": "mps"}, ["devices"]),
        ({"device": "xpu:1"}, ["devices"]),
        ({"quantization": "w8a8-decoder"}, ["w8a8"]),
        ({"kv_cache_dtype": "fp8"}, ["fp8_kv"]),
    ],
)
def test_flags_ask_for_rows(flags: dict[str, object], wanted: list[str]) -> None:
    assert required_by_flags(PDConfig(**flags)) == wanted  # type: ignore[arg-type]


def test_an_encoder_on_cuda_may_stand_before_a_decoder_in_8_bits() -> None:
    assert "int8_cuda" in required_by_flags(EncoderConfig(quantization="int8", device="cuda"))
    assert "int8_cuda" not in required_by_flags(EncoderConfig(quantization="int8-decoder", device="cuda"))


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"sliding_window": 64}, "Sliding windows"),
    ],
)
def test_a_checkpoint_that_asks_for_more_is_refused(change, title, tmp_path):
    path = edit_config(build_checkpoint("bart", tmp_path / "model"), **change)
    with pytest.raises(ConfigError, match=title):
        read_config(path)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("bart", tmp_path / "model")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="LoRA adapters"):
        read_config(path)


def test_decoder_only_models_keep_their_windows() -> None:
    assert required_by_checkpoint({"sliding_window": 64}) == []


TOKENIZER = Tokenizer(WordLevel({"yes": 4, "no": 9}, unk_token="no"))
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
CLASS = {"architectures": ["Qwen3VLForConditionalGeneration"]}
HEAD = {"architectures": ["Gemma3ForSequenceClassification"]}
RETRIEVER = {"architectures": ["ColPaliForRetrieval"]}
BY_TWO = PoolingDefaults("score", score_ids=(4, 9))
MODULES = "sentence_transformers.models"


def folder_of(tmp_path, name="model", config=None, **modules):
    """A checkpoint with these configs of modules, by class name; no modules.json where there are none."""
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or CLASS))
    listed = [{"idx": 0, "path": "", "type": f"{MODULES}.Transformer"}]
    for number, (kind, settings) in enumerate(modules.items(), 1):
        (path / f"{number}_{kind}").mkdir()
        (path / f"{number}_{kind}" / "config.json").write_text(json.dumps(settings))
        listed.append({"idx": number, "path": f"{number}_{kind}", "type": f"{MODULES}.{kind}"})
    if modules:
        (path / "modules.json").write_text(json.dumps(listed))
    return path


@pytest.mark.parametrize(
    ("modules", "defaults"),
    [
        ({}, GENERATES),
        ({"Pooling": LAST, "Normalize": {}}, PoolingDefaults("embed", "last", True)),
        ({"Pooling": {"pooling_mode": "mean"}}, PoolingDefaults("embed", "mean", False)),
        ({"Pooling": {"pooling_mode_cls_token": True}}, PoolingDefaults("embed", "cls", False)),
        ({"LogitScore": {"true_token_id": 4, "false_token_id": 9}}, BY_TWO),
        ({"LogitScore": {"true_token_id": 0}}, PoolingDefaults("score", score_ids=(0,))),
    ],
)
def test_modules_of_sentence_transformers_decide(tmp_path, modules, defaults):
    assert read_pooling(folder_of(tmp_path, **modules), TOKENIZER) == defaults


def test_a_score_head_is_found_where_modules_json_names_another_folder(tmp_path):
    path = folder_of(tmp_path, LogitScore={"true_token_id": 4, "false_token_id": 9})
    listed = (path / "modules.json").read_text()
    (path / "modules.json").write_text(listed.replace("1_LogitScore", "1_ScoreHead"))
    assert read_pooling(path, TOKENIZER) == BY_TWO
    (path / "1_LogitScore" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="true_token_id"):
        read_pooling(path, TOKENIZER)


def test_modules_that_hold_the_model_alone_leave_the_decision_to_its_class(tmp_path):
    path = folder_of(tmp_path, config=HEAD | {"id2label": {"0": "relevant"}}, Normalize={})
    (path / "modules.json").write_text(json.dumps([{"idx": 0, "path": "", "type": f"{MODULES}.Transformer"}]))
    assert read_pooling(path, TOKENIZER) == PoolingDefaults("score")


@pytest.mark.parametrize(
    ("name", "config", "defaults"),
    [
        ("model", HEAD | {"id2label": {"0": "relevant"}}, PoolingDefaults("score")),
        ("model", {"classifier_from_token": ["no", "yes"]}, PoolingDefaults("score", score_ids=(4, 9))),
        ("Qwen3-VL-Reranker-2B", {}, PoolingDefaults("score", score_ids=(4, 9))),
        ("Qwen3-VL-Embedding-2B", {}, GENERATES),
        ("model", RETRIEVER, PoolingDefaults("token_embed", "token", width=128)),
        ("model", RETRIEVER | {"embedding_dim": 24}, PoolingDefaults("token_embed", "token", width=24)),
    ],
)
def test_without_modules_the_class_the_config_or_the_name_decides(tmp_path, name, config, defaults):
    assert read_pooling(folder_of(tmp_path, name, config), TOKENIZER) == defaults


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ({"Pooling": {"pooling_mode": "max"}}, "max"),
        ({"Pooling": {"pooling_mode": ["cls", "mean"]}}, r"cls\+mean"),
        ({"Pooling": {"pooling_mode": "mean"}, "Dense": {}}, "Dense"),
    ],
)
def test_what_would_give_other_vectors_than_the_checkpoint_s_is_not_served(tmp_path, modules, named):
    with pytest.raises(ConfigError, match=named):
        read_pooling(folder_of(tmp_path, **modules), TOKENIZER)


@pytest.mark.parametrize("labels", [{}, {"id2label": {"0": "no", "1": "yes"}}])
def test_a_head_of_several_labels_is_not_served(tmp_path, labels):
    with pytest.raises(ConfigError, match="2 labels"):
        read_pooling(folder_of(tmp_path, config=HEAD | labels), TOKENIZER)


def test_tokens_that_the_tokenizer_lacks_are_named(tmp_path):
    with pytest.raises(ConfigError, match="relevant"):
        read_pooling(folder_of(tmp_path, config={"classifier_from_token": ["no", "relevant"]}), TOKENIZER)


def test_a_template_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    assert given_template("") == ""
    file.write_text("own")
    assert given_template(str(file)) == "own"
    for content in (b" \n", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"--chat-template .*own\.jinja (is empty|cannot be read)"):
            given_template(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        given_template(str(tmp_path / "none"))


def test_an_adapter_and_a_gguf_file_are_named_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    for named in (tmp_path, tmp_path / "model-q4.gguf"):
        with pytest.raises(ConfigError, match=r"holds model-q4\.gguf, which llama\.cpp serves: give"):
            check_folder(resolve_model(str(named)))
    (tmp_path / "model-q4.gguf").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a LoRA adapter: merge it into its checkpoint"):
        check_folder(resolve_model(str(tmp_path)))


def test_a_folder_is_checked_by_its_names_and_headers(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    check_folder(path)
    file = next(path.glob("*.safetensors"))
    whole = file.read_bytes()
    for damage, words in ((whole[:-9], "is damaged"), (b"", "is damaged")):
        file.write_bytes(damage)
        with pytest.raises(ConfigError, match=words):
            check_folder(path)
    file.write_bytes(whole)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"put its tokenizer\.json into the folder"):
        check_folder(path)
    check_folder(path, texts=False)
    file.rename(path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickles are never loaded"):
        check_folder(path)


def test_an_encoder_needs_what_prepares_pictures_and_a_pd_worker_does_not(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    check_encoder_model(path, EncoderConfig())
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"no image processor: give MODEL=/folder with preprocessor_config"):
        check_encoder_model(path, EncoderConfig())
    check_pd_model(path, PDConfig())
    (path / "processor_config.json").write_text("{}")
    check_encoder_model(path, EncoderConfig())
