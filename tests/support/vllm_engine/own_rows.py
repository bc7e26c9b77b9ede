"""A program for vLLM's own environment: the rows that its encoders make of pictures.

    python own_rows.py JOBS.json

JOBS is a list of {"checkpoint", "dtype", "text", "images", "out"}: a text with one placeholder, files, and
where to write the rows of each file (`out`.safetensors, by the file's name) and the prompts' ids
(`out`.json).
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


def encode(job: dict[str, Any]) -> None:
    """Has vLLM answer, and records what its encoder gives."""
    llm = LLM(
        job["checkpoint"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        limit_mm_per_prompt={"image": 1},
        enable_prefix_caching=False,
    )
    rows: list[torch.Tensor] = []

    def record(model: Any) -> None:
        own = model.embed_multimodal

        def embed(**inputs: Any) -> Any:
            outputs = own(**inputs)
            rows.extend(outputs)
            return outputs

        model.embed_multimodal = embed

    llm.apply_model(record)
    tensors, prompts = {}, {}
    for file in job["images"]:
        rows.clear()
        data = {"image": Image.open(file).convert("RGB")}
        [output] = llm.generate(
            [{"prompt": job["text"], "multi_modal_data": data}], _ONE_TOKEN, use_tqdm=False
        )
        tensors[Path(file).name] = torch.cat([part.flatten(0, -2).float() for part in rows])
        prompts[Path(file).name] = output.prompt_token_ids
    save_file(tensors, f"{job['out']}.safetensors")
    Path(f"{job['out']}.json").write_text(json.dumps(prompts))


def main() -> None:
    """All jobs; one that fails is reported and leaves no files."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            encode(job)
        except Exception:
            traceback.print_exc()
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
