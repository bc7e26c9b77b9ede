"""Which systems the rounds beside vLLM have."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.against_peer.rounds import MODELS, matrix_of, systems_of


@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_vllm_and_triptych_whatever_else_its_matrix_has(model: str, tmp_path: Path) -> None:
    config = tmp_path / "models" / model / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    systems = systems_of(matrix_of(model, tmp_path), before=None)
    assert {"vllm", "triptych", "colocated"} <= systems.keys()
