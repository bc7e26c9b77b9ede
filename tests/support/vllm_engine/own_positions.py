"""A program for vLLM's own environment: the positions that its classes count of prompts with items.

    python own_positions.py JOBS.json OUT.json

JOBS is a list of {"checkpoint", "architecture", "module", "tokens", "items"}; an item is {"modality",
"place", "runs", "metadata"}, as a call of its endpoint for token ids has them. OUT gets the {"positions",
"delta"} of each.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange


def feature_of(item: dict[str, Any]) -> MultiModalFeatureSpec:
    """The item as vLLM's engine has it."""
    place, mask = item["place"], None
    if item["runs"]:
        mask = torch.zeros(place["length"], dtype=torch.bool)
        for start, count in item["runs"]:
            mask[start : start + count] = True
    position = PlaceholderRange(place["offset"], place["length"], mask)
    return MultiModalFeatureSpec(
        decode_mm_kwargs_item(item["metadata"]), item["modality"], "0" * 64, position
    )


def count(job: dict[str, Any]) -> dict[str, Any]:
    """What the class counts, without weights."""
    module = importlib.import_module(f"vllm.model_executor.models.{job['module']}")
    cls = getattr(module, job["architecture"])
    model = cls.__new__(cls)
    object.__setattr__(model, "config", AutoConfig.from_pretrained(job["checkpoint"]))
    features = [feature_of(item) for item in job["items"]]
    positions, delta = model.get_mrope_input_positions(job["tokens"], features)
    return {"positions": positions.tolist(), "delta": delta}


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([count(job) for job in jobs]))
