"""Turns of systems that are measured side by side."""

from __future__ import annotations

from benchmarks.against_peer.loads import Turn


def a_turn(system: str, number: int, **more: object) -> Turn:
    fields = {
        "model": "small", "load": "text@16", "seed": 1, "date": "2026-11-23 09:00", "commit": "abc",
        "chip": "chip", "requests": 32, "failed": 0, "others": 0.0, "req_s": 1.0,
        "ttft_ms": 100.0, "tpot_ms": 50.0, "cpu_s": 0.5,
    }  # fmt: skip
    return Turn(**(fields | {"system": system, "number": number} | more))  # type: ignore[arg-type]
