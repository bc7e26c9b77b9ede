"""What a PD worker says of its checkpoint when it starts, and what it registers."""

from __future__ import annotations

import logging

import pytest

from support.data.checkpoints import build_checkpoint, edit_config
from triptych.base.config import PDConfig
from triptych.pd_worker.vllm.worker import load_front_model


@pytest.mark.parametrize("beams", [None, 1, 4])
def test_beam_search_in_generation_config_is_a_warning(tmp_path, beams, caplog):
    path = build_checkpoint("qwen3_vl", tmp_path / "model")
    edit_config(path, "generation_config.json", num_beams=beams)
    with caplog.at_level(logging.WARNING, "triptych"):
        load_front_model(PDConfig(model=str(path), dtype="float32", engine="vllm"), 512)
    found = [line.getMessage() for line in caplog.records if "num_beams" in line.getMessage()]
    assert len(found) == (beams == 4)
    assert all("asks for beam search (num_beams 4), which is not done" in line for line in found)
