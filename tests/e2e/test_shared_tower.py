"""Fine-tunes with a frozen tower: encoders of one serve PD workers of all, and embeddings are shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import ask, expected, mixed_cases
from support.processes.cluster import running_cluster, wait_for

pytestmark = pytest.mark.timeout(300)

TOKENS = 24


async def test_a_picture_that_the_original_has_seen_costs_its_fine_tune_no_tower_call(tmp_path: Path) -> None:
    original, tuned = (build_checkpoint("qwen3_vl", tmp_path / name) for name in ("original", "tuned"))
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.language_model.layers.0.mlp.down_proj.weight"] *= -1
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    case = mixed_cases(2, seed=23)[1]
    with running_cluster(original, tmp_path / "run", "--threads", "1") as cluster:
        memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
        cluster.add_worker("pd", str(tuned), "--threads", "1", *memory)
        wait_for("both models", lambda: cluster.models().keys() == {"original", "tuned"})
        first = await ask(cluster.url, case, TOKENS, model="original")
        towers = cluster.total("encoder", "triptych_encoder_tower_items_total")
        second = await ask(cluster.url, case, TOKENS, model="tuned")
        assert towers > 0
        assert cluster.total("encoder", "triptych_encoder_tower_items_total") == towers
        assert second.timings["items"][0]["cache"] != "encoded"
        for path, answer in ((original, first), (tuned, second)):
            assert_exact(expected(path, [case], TOKENS), [answer.token_ids], min_distinct=5)
        assert first.token_ids != second.token_ids
