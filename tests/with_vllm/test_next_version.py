"""What we use of vLLM is in the release that has no CPU build yet, by its sources: read, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.vllm_engine.server import HOME
from triptych.base.config import PDConfig
from triptych.base.types import DRAWING
from triptych.pd_worker.vllm.http.call import EngineCall, body_of, too_many_body
from triptych.pd_worker.vllm.own_server import server_args

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

#: The sources of the wheel that `make test-vllm` unpacks, and of the release that it runs.
NEXT = HOME / "next" / "vllm"
RUN = next(iter((HOME / "venv" / "lib").glob("python3*/site-packages/vllm")), HOME)

_EC = "distributed/ec_transfer/ec_connector"
_PROTOCOL = "entrypoints/scale_out/token_in_token_out/protocol.py"
#: By file: functions that we call, and methods that vLLM calls of ours.
CALLS = {
    f"{_EC}/base.py": [
        f"ECConnectorBase.{name}"
        for name in (
            *("__init__", "has_cache_item", "ensure_cache_available", "take_unavailable_requests"),
            *("update_state_after_alloc", "build_connector_meta", "request_finished", "start_load_caches"),
            *("start_save_caches", "save_caches", "shutdown", "_get_connector_metadata"),
        )
    ],
    f"{_EC}/utils.py": [
        "PlaceholderMetadataResolver.__init__", "PlaceholderMetadataResolver.fields_for",
        "collect_ec_item_metadata",
    ],
    "distributed/parallel_state.py": ["get_tp_group"],
    "config/kv_transfer.py": ["KVTransferConfig.has_connector"],
    "config/model.py": ["ModelConfig.get_inputs_embeds_size"],
    "multimodal/inputs.py": ["PlaceholderRange.get_num_embeds"],
}  # fmt: skip
#: By file and class: what we read, or send.
NAMES = {
    ("v1/request.py", "Request"): {"request_id", "mm_features", "ec_transfer_params"},
    ("v1/core/sched/output.py", "SchedulerOutput"): {"free_encoder_mm_hashes"},
    ("multimodal/inputs.py", "MultiModalFeatureSpec"): {"data", "modality", "identifier", "mm_position"},
    ("multimodal/inputs.py", "PlaceholderRange"): {"offset", "length", "is_embed"},
    ("config/vllm.py", "VllmConfig"): {
        "ec_transfer_config", "kv_transfer_config", "model_config", "parallel_config",
        "max_concurrent_batches",
    },
    ("config/parallel.py", "ParallelConfig"): {"nnodes", "world_size", "distributed_executor_backend"},
    ("config/model.py", "ModelConfig"): {"dtype", "hf_config", "multimodal_config", "is_encoder_decoder"},
    (f"{_EC}/base.py", "ECConnectorRole"): {"SCHEDULER", "WORKER"},
    (_PROTOCOL, "MultiModalFeatures"): {"mm_hashes", "mm_placeholders", "mm_metadata"},
    (_PROTOCOL, "PlaceholderRangeInfo"): {"offset", "length"},
    (_PROTOCOL, "GenerateRequest"): {"features", "ec_transfer_params", "request_id"}
    | set(body_of(EngineCall([0], {}))),
    ("sampling_params.py", "SamplingParams"): {
        *too_many_body()["sampling_params"], *DRAWING, "seed", "max_tokens", "min_tokens", "ignore_eos",
        "stop_token_ids", "detokenize", "bad_words", "logprobs", "structured_outputs",
        "presence_penalty", "frequency_penalty", "repetition_penalty",
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def unpacked() -> None:
    if not NEXT.is_dir():
        raise FileNotFoundError(f"no sources of the next vLLM in {NEXT}: use `make test-vllm`")


def module(root: Path, file: str) -> ast.Module:
    return ast.parse((root / file).read_text(encoding="utf-8"))


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def signature(root: Path, file: str, name: str) -> ast.arguments:
    tree = module(root, file)
    owner, _, function = name.rpartition(".")
    body = class_of(tree, owner).body if owner else tree.body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next(node for node in body if isinstance(node, kinds) and node.name == function).args


def parameters(given: ast.arguments) -> tuple[list[str], set[str], bool]:
    """Those by position, those that must be given, and whether any keyword is taken."""
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    needed = set(names[: len(names) - len(given.defaults)])
    needed |= {
        each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
    }
    return names, needed, given.kwarg is not None


def members(tree: ast.Module, name: str) -> Iterator[str]:
    """Fields, methods and attributes that a class sets on itself."""
    for node in ast.walk(class_of(tree, name)):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute):
                    yield target.attr


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in CALLS.items() for name in names])
def test_a_signature_that_we_use_has_not_changed(file, name):
    before, after = parameters(signature(RUN, file, name)), parameters(signature(NEXT, file, name))
    assert after == before


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_a_class_still_has_what_we_read_of_it_or_send(file, name):
    assert NAMES[file, name] - set(members(module(NEXT, file), name)) == set()


def test_the_words_of_a_server_that_a_worker_starts_are_still_flags(checkpoint):
    words = server_args(PDConfig(model=str(checkpoint), dtype="float32"), 1, "file", 0)
    flags = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    known: set[str] = set()
    for file in ("engine/arg_utils.py", "entrypoints/common/cli_args.py"):
        text = (NEXT / file).read_text(encoding="utf-8")
        known |= {flag for flag in flags if flag in text}
    assert flags - known == set()
    assert "disable_uvicorn_access_log" in flags and "skip_mm_profiling" in flags
