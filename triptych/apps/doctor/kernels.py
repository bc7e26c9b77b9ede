"""The kernels that a PD worker would compute with here, and why not with faster ones."""

from __future__ import annotations

from triptych.apps.doctor.finding import CheckResult, note, ok
from triptych.base.config import PDConfig


def check_kernels(pd: PDConfig) -> list[CheckResult]:
    """A line for each part of a step; a note where something faster is not used, and why."""
    import torch

    from triptych.models.weights.kernel_report import Capabilities, kernels_in_use
    from triptych.pd_worker.attention.attention import backend_on

    if pd.device != "cpu":
        return []
    uses = kernels_in_use(
        Capabilities.of_this(),
        device=pd.device,
        dtype=torch.float32 if pd.dtype == "auto" else getattr(torch, pd.dtype),
        attention=backend_on(torch.device(pd.device), pd.attention_backend),
        linear=pd.linear_kernel,
        quantization=pd.quantization,
    )
    return [
        note(f"kernel of {use.part}", f"{use.kernel}: {use.why}")
        if use.why
        else ok(f"kernel of {use.part}", use.kernel)
        for use in uses
    ]
