"""Cells of the baselines with known figures, for reports without a server."""

from __future__ import annotations

from typing import Any

TOML = """
name = "toy"
model = "${MODELS}/toy"
about = "a toy"
repeats = 2
[loads]
text = "ttft:200 tpot:50"
mix = "ttft:200 tpot:50"
reuse-50 = "ttft:200 tpot:50"
images-4 = "ttft:200 tpot:50"
[[system]]
name = "colocated"
launch = "1E1PD"
[[system]]
name = "epd-shared"
launch = "1E1PD"
words = ["--threads", "1"]
[[system]]
name = "vllm"
commands = [["serve", "--port", "${PORT}", "${MODEL}"]]
url = "http://127.0.0.1:${PORT}"
ports = ["PORT"]
[system.env]
FOLDER = "${PEER}/lib"
[[system]]
name = "colocated-big"
launch = "1E1PD"
variant_of = "colocated"
brief = true
[[cells]]
kind = "capacity"
loads = ["text", "mix", "reuse-50", "images-4"]
systems = ["colocated", "colocated-big"]
[[cells]]
kind = "fixed"
loads = ["text", "mix"]
systems = ["colocated", "epd-shared", "vllm"]
[[cells]]
kind = "search"
loads = ["images-4"]
systems = ["colocated", "epd-shared"]
[[cells]]
kind = "search"
loads = ["reuse-50"]
systems = ["vllm", "epd-shared"]
"""
ENVIRONMENT = {"MODELS": "/models", "PEER": "/peer"}


def window(
    throughput: float = 5.0, ttft: float = 100.0, tpot: float = 10.0, failed: int = 0, **more: Any
) -> dict[str, Any]:
    """Ten requests, half of them with a picture; latencies in ms."""
    stages = {"queue": 0.01, "encode": 0.02, "prefill": 0.03, "decode": 0.5}
    return {
        "label": "5/s",
        "num_prompts": 10,
        "completed": 10 - failed,
        "failed": failed,
        "request_throughput": throughput,
        "slo_attainment": 1 - failed / 10,
        "sustained": not failed,
        "p99_ttft_ms": ttft,
        "p99_tpot_ms": tpot,
        "by_kind": {"text": {"p99_tpot_ms": tpot}, "images": {"p99_tpot_ms": tpot}},
        "p99_late_ms": 0.2,
        "client_cpu_share": 0.05,
        "input_lens": [50] * 10,
        "errors": ["late"] * failed + [""] * (10 - failed),
        "stages": [stages] * 10,
    } | more


def cell(
    kind: str,
    load: str,
    system: str,
    repeat: int = 0,
    *,
    windows: list[dict[str, Any]] | None = None,
    rate: float | None = None,
    goodput: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """As the runner writes it; `goodput` makes it a search."""
    search = {"max_request_goodput": goodput, "lowest_failing_rate": None, "drifted": False}
    return {
        "cell": {"kind": kind, "load": load, "system": system, "repeat": repeat},
        "status": "done",
        "why": "",
        "attempt": 1,
        "date": f"2026-01-0{repeat + 1} 10:00:00",
        "wall_s": 40.0,
        "rate": rate,
        "windows": [window()] if windows is None else windows,
        "search": None if goodput is None else search,
        "cpu_shares": {"pd-0": 0.8, "encoder-0": 0.3},
        "memory_mb": 1000.0,
        "others_share": 0.01,
        "machine": {
            "commit": "abc",
            "versions": {"python": "3.11"},
            "chip": "a chip",
            "cores": 2,
            "memory_gib": 8.0,
            "load_at_start": 0.1,
        },
        "server": {"command": "serve", "seconds_to_ready": 4.5},
    } | more
