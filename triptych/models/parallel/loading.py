"""Loading of a decoder side, or of one rank's share of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from triptych.models.checkpoint.cut import Cut
from triptych.models.checkpoint.folder import Checkpoint
from triptych.models.parallel.plan import ShardPlan, check_divides
from triptych.models.parallel.sharding import divide, join
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.weights.loading import load_into


def load_share(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: dict[str, str],
    *,
    plan: ShardPlan,
    parallel: TensorParallel | None,
    device: torch.device,
    dtype: torch.dtype,
    tied: Iterable[tuple[str, str]] = (),
    computed: Mapping[str, torch.Tensor] | None = None,
    quantize: bool = False,
) -> None:
    """Fills an empty `module`, as `load_into` does; with `parallel` with this rank's share by `plan`.

    A rank reads its own parts of the checkpoint only, but for 8-bit weights that are divided by inputs: those
    are read whole, one at a time. ConfigError for heads that cannot be divided among so many ranks.
    """
    cuts: dict[str, Cut] = {}
    if parallel is not None:
        check_divides(checkpoint.path, plan.heads, plan.kv_heads, parallel.size)
        cuts = divide(module, plan, parallel)
    load_into(
        module,
        checkpoint,
        names,
        device=device,
        dtype=dtype,
        tied=tuple(tied),
        computed=computed,
        quantize=quantize,
        cuts=cuts,
    )
    if parallel is not None:
        join(module, plan, parallel, cuts)
