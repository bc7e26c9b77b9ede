"""Published comparisons of encoder disaggregation, simulated with what is known of them.

Three reports, read as they were published:

- vLLM pull request 41567 (comment of 21 August 2026): Qwen3.5-35B-A3B on GB200, MUIRBench (several pictures,
  two tokens out), 1200 requests, 96 in flight.
- llm-d's report of 5 August 2026 (llm-d.ai, "Scaling Vision-Heavy Kimi-VL"): Kimi-VL-A3B with SGLang, four
  pictures of 1080p, 128 requests, 8 in flight; one H200, and the same with four Arc Pro B60 that encode.
- LMSYS' report of 29 May 2026 (lmsys.org, "Heterogeneous CPU + GPU EPD"): Qwen3-VL-8B with SGLang, eight
  pictures of 1080p, 32 requests at 1 to 2 per second; one L40S encodes for four others, alone and with
  four CPU nodes.

SGLang's load generator draws lengths uniformly up to the given ones, unless told otherwise: so do we.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from triptych.base.config import GIB, PDConfig, ProxyConfig
from triptych.goodput.load.job import RequestRecord
from triptych.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests
from triptych.simulator.cluster.shape import ClusterShape, Limits, WorkerRole, in_step, on_devices
from triptych.simulator.costs.costs import (
    CHIPS,
    MEMORY,
    QWEN3_VL_4B,
    QWEN3_VL_4B_SHAPE,
    RPC,
    SEQUENCE_OVERHEAD,
    STEP_OVERHEAD,
    CostModel,
    EncoderCosts,
    Geometry,
    ModelShape,
    PDCosts,
    ProxyCosts,
    encoder_costs,
    published,
)
from triptych.simulator.run import simulate

_HD = ((1920, 1080, 1.0),)
_NO_PROXY = ProxyCosts(0.0, 0.0, 0.0)


#: As a table has them: requests per second; in ms means and P99 of TTFT and TPOT, P50, P90, P99 of requests.
Cells = list[str]


def cells_of(records: Sequence[RequestRecord]) -> Cells:
    """Over all requests: these runs have no warm-up."""
    assert all(record.ok for record in records), "a request has failed"
    seconds = max(record.sent + record.e2e for record in records)
    tpots = [record.tpot for record in records if record.output_tokens > 1]
    ttfts, ends = [record.ttft for record in records], [record.e2e for record in records]
    means = f"{1000 * statistics.fmean(ttfts):.0f}, {1000 * statistics.fmean(tpots):.1f}"
    tails = ", ".join(f"{1000 * percentile(values, 0.99):.0f}" for values in (ttfts, tpots))
    whole = ", ".join(f"{1000 * percentile(ends, share):.0f}" for share in (0.5, 0.9, 0.99))
    return [f"{len(records) / seconds:.2f}", means, tails, whole]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass(frozen=True, slots=True)
class Report:
    """A published load and the model it was sent to."""

    load: Workload
    requests: int
    model: ModelShape
    limits: Limits
    concurrency: int = 0

    def run(self, shape: ClusterShape, costs: CostModel, rate: float = 0.0) -> Cells:
        planned = plan_requests(self.load, self.requests, 0)
        times = arrival_times(Arrivals(rate=rate), self.requests, 0) if rate else [0.0] * self.requests
        result = simulate(planned, times, shape, costs, self.model, self.limits, concurrency=self.concurrency)
        return cells_of(result.records)


def _limits(kv_memory: int, tokens: int, seqs: int = 128) -> Limits:
    pd = PDConfig(
        kv_memory=kv_memory,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        encoder_cache_memory=8 * GIB,
        prefix_caching=False,
    )
    return Limits(proxy=ProxyConfig(max_queue=100_000), pd=pd, store_memory=64 * GIB, client_timeout=3600.0)


def _costs(name: str, encoder: EncoderCosts, pd: PDCosts, proxy: ProxyCosts = _NO_PROXY) -> CostModel:
    return CostModel(name, "published figures, see this file", encoder, pd, proxy, RPC)


# vLLM pull request 41567. Sizes of the pictures are not in it: 4.3 of 640x480 stand for MUIRBench's mean.
VLLM = Report(
    Workload(100, 2, ((2, 0.3), (4, 0.4), (6, 0.2), (9, 0.1)), ((640, 480, 1.0),)),
    1200,
    ModelShape(16, 2, 65536, 1 << 24, 4096, 20480, 8),
    _limits(64 * GIB, 8192),
    concurrency=96,
)
_PICTURES, _PATCHES = 4.3, 1200
_TOKENS = 108 + _PICTURES * (_PATCHES // 4 + 2)
#: Seconds of a request in the tower and in the decoder: fitted to the two rates that have one GPU per stage,
#: 32.75 a second with both apart and 21.76 with both on one.
VLLM_TOWER = 1 / 32.75
VLLM_DECODER = 1 / 21.76 - VLLM_TOWER


def vllm_costs(decoder_gpus: int = 1) -> CostModel:
    """`decoder_gpus`: tensor parallelism, taken to be free of cost; the tower does not gain by it."""
    prefill = (VLLM_DECODER - 2 * SEQUENCE_OVERHEAD) / _TOKENS / decoder_gpus
    tower = EncoderCosts(0.0, 0.0, 0.0, 0.0, VLLM_TOWER / _PICTURES / _PATCHES, 1e-3, 1e-9)
    return _costs("#41567", tower, PDCosts(1e-3, prefill, SEQUENCE_OVERHEAD, 0.0, 0.0, 1e-3, 1e-9))


def vllm() -> dict[str, Cells]:
    return {
        "one GPU": VLLM.run(in_step(1), vllm_costs()),
        "TP2": VLLM.run(in_step(1), vllm_costs(2)),
        "1E1PD": VLLM.run(on_devices(1, 1), vllm_costs()),
        "two replicas": VLLM.run(in_step(2), vllm_costs()),
    }


# llm-d's Kimi-VL: at most 4096 patches a picture, 2.8 G of 16 G parameters active.
KIMI = Report(
    Workload(64, 64, ((4, 1.0),), _HD, text_spread=1.0, output_spread=1.0),
    128,
    ModelShape(14, 2, 784, 4096 * 14**2, 4096, 31104, 8),
    _limits(64 * GIB, 8192),
    concurrency=8,
)
_KIMI: Geometry = replace(
    QWEN3_VL_4B, hidden=2048, vit_layers=27, vit_hidden=1152, vit_intermediate=4304, patch=14, deepstack=0
)
_ACTIVE, _ALL = 2.8e9, 16e9


def kimi_costs(chip: str = "h200") -> CostModel:
    """By roofline: `chip` encodes, an H200 does the rest, all experts read once a step."""
    gpu = CHIPS["h200"]
    bandwidth = gpu.bandwidth * MEMORY
    pd = PDCosts(
        step=STEP_OVERHEAD + 2 * _ALL / bandwidth,
        prefill_token=2 * _ACTIVE / (gpu.flops * gpu.matmul),
        decode_seq=SEQUENCE_OVERHEAD,
        context_token=KIMI.model.kv_token_bytes / bandwidth,
        prefill_context=1e-9,
        load_item=1e-3,
        load_byte=1e-9,
    )
    return _costs(f"Kimi-VL on {chip}", encoder_costs(CHIPS[chip], _KIMI), pd)


def kimi_fitted(seconds: float, chip: str = "h200", *, door: bool = False) -> CostModel:
    """`seconds` a picture, in the tower or at a door that serves one picture after another."""
    costs = kimi_costs(chip)
    encoder = replace(costs.encoder, prepare_item=0.0, prepare_pixel=0.0)
    if door:
        return replace(costs, encoder=encoder, proxy=replace(_NO_PROXY, item=seconds))
    fitted = replace(encoder, tower_batch=0.0, tower_item=seconds, tower_patch=0.0, tower_pair=0.0)
    return replace(costs, encoder=fitted)


#: Seconds a picture: fitted to 0.32 requests/s of the H200 alone, and to 0.84 with four B60.
KIMI_H200, KIMI_B60 = 0.74, 1.18


def kimi() -> dict[str, Cells]:
    b60 = kimi_costs("b60").encoder
    slow = kimi_fitted(KIMI_B60).encoder
    return {
        "H200, roofline": KIMI.run(in_step(1), kimi_costs()),
        "4 B60 + H200, roofline": KIMI.run(on_devices(4, 1, b60), kimi_costs()),
        "H200, fitted, in the step": KIMI.run(in_step(1), kimi_fitted(KIMI_H200)),
        "H200, fitted, at a door": KIMI.run(in_step(1), kimi_fitted(KIMI_H200, door=True)),
        "4 B60 + H200, fitted": KIMI.run(on_devices(4, 1, slow), kimi_costs()),
    }


#: huggingface.co/Qwen/Qwen3-VL-8B-Instruct, config.json; processor and chat template are the 4B's.
QWEN3_VL_8B = replace(
    QWEN3_VL_4B, hidden=4096, intermediate=12288, vit_layers=27, vit_hidden=1152, vit_intermediate=4304
)
# LMSYS' Qwen3-VL-8B on L40S, by roofline alone; the CPU node's share of its peak is theirs.
LMSYS = Report(
    Workload(64, 128, ((8, 1.0),), _HD, text_spread=1.0, output_spread=1.0),
    32,
    replace(QWEN3_VL_4B_SHAPE, row_bytes=QWEN3_VL_8B.row_bytes, kv_token_bytes=QWEN3_VL_8B.kv_token_bytes),
    _limits(20 * GIB, 8192),
)
LMSYS_RATES = (1.0, 1.2, 1.5, 2.0)


def lmsys() -> dict[tuple[str, float], Cells]:
    costs = replace(published("l40s", QWEN3_VL_8B), proxy=_NO_PROXY)
    cpu = published("cpu", QWEN3_VL_8B).encoder
    pd = (WorkerRole(decodes=True),) * 4
    gpu, cpus = (WorkerRole(encodes=True),), (WorkerRole(encodes=True, encoder=cpu),) * 4
    shapes = (ClusterShape("1E4PD", gpu + pd), ClusterShape("(1 + 4 CPU)E4PD", gpu + cpus + pd))
    return {(shape.name, rate): LMSYS.run(shape, costs, rate) for rate in LMSYS_RATES for shape in shapes}
