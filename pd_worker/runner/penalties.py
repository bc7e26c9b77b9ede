"""Changes a row of logits by what a request has said so far, in transformers' and OpenAI's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from triptych.pd_worker.core.sampling import ResolvedSampling


def penalise(
    row: torch.Tensor, params: ResolvedSampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> None:
    """Changes `row` [V], float32: bias, then repetition, then frequency and presence.

    Repetition counts tokens of prompt and output, once each; the other two those of the output.
    """
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        row[_tensor(ids, row)] += torch.tensor(values, dtype=row.dtype, device=row.device)
    if params.repetition_penalty != 1:
        seen = _tensor([*prompt_ids, *output_ids], row)
        logits = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(logits < 0, logits * factor, logits / factor)
    if output_ids and (params.frequency_penalty or params.presence_penalty):
        said, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        loss = counts * params.frequency_penalty + params.presence_penalty
        row[torch.from_numpy(said).to(row.device)] -= torch.from_numpy(loss).to(row)


def _tensor(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=row.device)
