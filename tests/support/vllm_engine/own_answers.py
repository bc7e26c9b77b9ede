"""A program for vLLM's own environment: what vLLM alone answers to messages with pictures.

    python own_answers.py JOB.json

JOB is {"checkpoint", "dtype", "conversations", "tokens", "out"}: lists of messages as a client sends them,
all asked at once; "limits", where given, are the most items. `out` gets a list of {"prompt", "tokens",
"margins", "runners_up"}: the ids, and at each step what the best token has over the second, in logarithms,
and which that is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["checkpoint"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        limit_mm_per_prompt=job.get("limits", {"image": 8, "video": 0}),
    )
    greedy = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=2)
    outputs = llm.chat(job["conversations"], greedy, use_tqdm=False)
    Path(job["out"]).write_text(json.dumps([_answer(output) for output in outputs]))


def _answer(output: Any) -> dict[str, Any]:
    (only,) = output.outputs
    steps = [sorted(step.items(), key=lambda entry: -entry[1].logprob) for step in only.logprobs]
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(only.token_ids),
        "margins": [best[1].logprob - second[1].logprob for best, second, *_ in steps],
        "runners_up": [second[0] for _, second, *_ in steps],
    }


if __name__ == "__main__":
    main()
