"""The cluster of the comparison: slow encoders beside more PD workers and store than the traces need."""

from __future__ import annotations

from dataclasses import replace

from triptych.config import GIB, EncoderConfig, PDConfig, ProxyConfig
from triptych.goodput.measure.slo import Slo
from triptych.simulator.autoscale.pool import TrialSetup
from triptych.simulator.cluster.shape import Limits
from triptych.simulator.costs.published import QWEN3_VL_4B, QWEN3_VL_4B_SHAPE, Chip, encoder_costs, published

#: Encoders on CPUs that reach 4 TFLOP/s of bfloat16, and 300 GB/s. Assumed, not measured.
CPU = Chip("a server CPU", 8e12, 300e9, 0.5, 64 * 10**9)
SLO = Slo((("ttft", 10_000.0), ("tpot", 100.0)))


def trial_setup() -> TrialSetup:
    """Encoders on `CPU`, three PD workers on A100s by their published costs."""
    name = f"encoders on {CPU.name}, PD workers on an A100"
    return TrialSetup(
        costs=replace(published("a100-80g"), name=name, encoder=encoder_costs(CPU, QWEN3_VL_4B)),
        model=QWEN3_VL_4B_SHAPE,
        pd_workers=3,
        limits=Limits(
            proxy=ProxyConfig(max_queue=100_000),
            encoder=EncoderConfig(device="cpu"),
            pd=PDConfig(
                kv_memory=20 * GIB,
                max_num_seqs=256,
                max_num_batched_tokens=2048,
                encoder_cache_memory=4 * GIB,
            ),
            store_memory=64 * GIB,
        ),
        slo=SLO,
    )
