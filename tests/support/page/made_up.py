"""What a made-up cluster says to the page: hostile texts, states that are rare, 50 streams."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HOSTILE = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
STAGES = ("fetch", "queue", "encode", "load", "prefill", "decode")


@dataclass
class MadeUp:
    """What the server says; a test changes it while the page looks."""

    key: str = ""
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "demo"}])
    answer: str = "A red circle."
    #: Status of /cluster/events; 200 streams snapshots every `tick` seconds.
    events_status: int = 200
    tick: float = 1.0
    in_flight: int = 3
    encoder_state: str = "serving"
    store_up: bool = True
    encoders: int = 3
    pd_workers: int = 2
    version: str = "0.9"
    #: Seconds by which the server's clock is ahead of the browser's.
    skew: float = 0.0
    #: Items of the request whose record is asked for; the record lists the first 16 one by one.
    items: int = 0
    text: str = ""
    #: Requests that have ended.
    ended: int = 12
    #: What the model thinks before its answer.
    reasoning: str = ""
    #: Connections of /cluster/events so far, and requests that were asked.
    connections: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)

    def snapshot(self) -> dict[str, Any]:
        now = time.time() + self.skew
        wave = 0.5 + 0.4 * math.sin(now / 7)
        states = ["serving", self.encoder_state, *["serving"] * self.encoders]
        encoders = [_encoder(at, self.text, states[at], wave / (1 + at % 2)) for at in range(self.encoders)]
        live = sum(encoder["state"] == "serving" for encoder in encoders)
        return {
            "time": now,
            "version": self.version,
            "uptime": 5025.0,
            "proxies": 2,
            "proxy": {
                "id": "proxy-1a2b3c",
                "draining": False,
                "in_flight": self.in_flight,
                "queued": self.in_flight // 8,
                "max_queue": 256,
                "memory_bytes": 187_000_000,
            },
            "store": {
                "up": self.store_up,
                "used_bytes": int(71e6 * wave),
                "max_bytes": 128 << 20,
                "evictions": 12,
            },
            "models": [model["id"] for model in self.models],
            "encoders": encoders,
            "pd_workers": [_pd(i, self.text, wave, self.in_flight) for i in range(self.pd_workers)],
            "scaling": {
                "encoder": {
                    "live": live,
                    "desired": 3,
                    "reason": f"2.1 s of work wait, 0.7 a worker {self.text}",
                },
                "pd": {"live": self.pd_workers, "desired": None, "reason": ""},
            },
            **_load(wave),
            "requests": [_request(index, self.text, now) for index in range(min(64, self.in_flight))],
            "failures": [
                {
                    "time": now // 100 * 100,
                    "what": f"An encoder stopped answering {self.text}",
                    "remedy": f"Its jobs went to another encoder; look at its log. {self.text}",
                    "where": "10.0.0.7:50051",
                }
            ],
        }

    def history(self) -> dict[str, Any]:
        def line(scale: float, shift: float = 0.0) -> list[float | None]:
            return [None] * 30 + [
                scale * (0.5 + 0.3 * math.sin(at / 9 + shift) + 0.15 * math.sin(at / 2)) for at in range(690)
            ]

        levels: list[float | None] = [None] * 30 + [float(2 + (at > 70)) for at in range(690)]
        names = {
            "in_flight": 40.0,
            "queued": 5.0,
            "requests": 8.0,
            "tokens": 500.0,
            "items": 6.0,
            "errors": 0.4,
        }
        series = {name: line(scale, scale) for name, scale in names.items()}
        series |= {"hit_rate": line(0.9), "met": line(1.0, 2), "kv_usage": line(0.8, 3)}
        series |= {"encoder_busy": line(1.1), "pd_busy": line(0.7, 2)}
        series |= {
            "encoders": levels,
            "desired_encoders": [*levels[6:], *[3.0] * 6],
            "pd_workers": [None] * 30 + [2.0] * 690,
        }
        return {"step": 5, "end": time.time() + self.skew, "series": series}

    def finished(self, order: str, failed: bool, model: str) -> dict[str, Any]:
        rows = [_finished(index, self.text) for index in range(self.ended)]
        rows = [row for row in rows if (row["status"] >= 400 or not failed) and model in ("", row["model"])]
        rows.sort(key=lambda row: row["seconds" if order == "slowest" else "ended"], reverse=True)
        return {"requests": rows[:50], "models": ["demo", "other"]}

    def record(self, name: str) -> dict[str, Any]:
        def span(
            stage: str,
            start: float,
            end: float,
            where: str,
            item: int | None = None,
            note: str = "",
            awaits: str = "",
        ) -> dict[str, Any]:
            return {
                "name": stage,
                "start": start,
                "end": end,
                "where": where,
                "item": item,
                "note": note + self.text,
                "awaits": awaits,
            }

        spans = [
            span("fetch", 0.0, 0.012, "proxy"),
            span("queue", 0.012, 0.03, "proxy"),
            span("wait", 0.03, 0.28, "10.0.0.9:50052", None, "for item 1: encode", "encode"),
            span("wait", 0.28, 0.296, "10.0.0.9:50052", None, "for item 1: save", "save"),
            span("wait", 0.296, 0.31, "10.0.0.9:50052", None, "for item 1: load", "load"),
            span("encode", 0.03, 0.28, "10.0.0.7:50051", 0),
            span("encode", 0.031, 0.24, "10.0.0.8:50051", 1),
            span("encode", 0.03, 0.03, "store", 2, "in the store: no encoder job"),
            span("save", 0.28, 0.296, "store", 0),
            span("load", 0.296, 0.31, "10.0.0.9:50052", 0),
            span("prefill", 0.31, 0.395, "10.0.0.9:50052"),
            span("decode", 0.395, 0.84, "10.0.0.9:50052"),
        ]
        return {
            "id": name,
            "model": "demo",
            "started": time.time(),
            "seconds": 0.842,
            "status": 200,
            "prompt_tokens": 152,
            "completion_tokens": 17,
            "cached_tokens": 64,
            "items": self.items or 3,
            "spans": spans if not self.items else [*spans[:1], *_many(self.items, span), *spans[-2:]],
        }


def _many(items: int, span: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """Encodes of very many items: the first 16 one by one, the others in one span."""
    told = [span("encode", 0.03, 0.1 + at / 100, "10.0.0.7:50051", at) for at in range(16)]
    return [*told, span("encode", 0.2, 0.31, "", 16, f"{items - 16} further items, summed")]


def _load(wave: float) -> dict[str, Any]:
    """Rates and goodput of the last minute."""
    rates = {"requests": 6.2 * wave, "tokens": 412 * wave, "items": 5.1 * wave, "errors": 0.0}
    latencies = {"ttft_p50": 0.21, "ttft_p99": 1.32, "tpot_p50": 0.018, "tpot_p99": 0.062}
    return {
        "rates": {**rates, "hit_rate": 0.4 + wave / 2},
        "flows": {
            "encoded": {"items": 5.1, "bytes": 3 << 20},
            "store": {"items": 2.0, "bytes": 1 << 20},
            "shm": {"items": 3.1, "bytes": 2 << 20},
            "peer": {"items": 0.0, "bytes": 0},
        },
        "goodput": {"ttft_slo": 2.0, "tpot_slo": 0.1, "met": 0.9 + wave / 10, **latencies},
    }


def _encoder(index: int, text: str, state: str, wave: float) -> dict[str, Any]:
    reason = (
        ""
        if state == "serving"
        else f"no heartbeat for 6 s: its jobs went elsewhere; is the process alive? {text}"
    )
    return {
        "name": f"10.0.{index // 200}.{7 + index % 200}:50051{text}",
        "address": f"10.0.{index // 200}.{7 + index % 200}:50051",
        "model": f"demo{text}",
        "kind": "cpu",
        "state": state,
        "reason": reason,
        "busy": 0.97 if state == "serving" else None,
        "memory_bytes": 390_000_000,
        "gpu": None,
        "jobs": round(8 * wave),
        "work_seconds": 1.9 * wave,
        "done": 1210 + index,
        "encode_ms": 61.0 + 20 * wave,
    }


def _pd(index: int, text: str, wave: float, in_flight: int) -> dict[str, Any]:
    return {
        "name": f"10.0.0.{20 + index}:50052{text}",
        "address": f"10.0.0.{20 + index}:50052",
        "model": "demo",
        "kind": "cpu",
        "state": "serving",
        "reason": "",
        "busy": wave,
        "memory_bytes": 1_264_000_000,
        "gpu": {"use": 0.71, "memory_bytes": 16 << 30, "max_memory_bytes": 24 << 30},
        "requests": in_flight // 2,
        "running": in_flight // 2,
        "waiting": in_flight // 9,
        "kv_usage": 0.75 * wave,
        "cache_usage": 0.5 * wave,
        "tokens_per_second": 210 * wave,
    }


def _finished(index: int, text: str) -> dict[str, Any]:
    return {
        "id": f"{0xB1B2C3D4 + index * 7919:08x}",
        "model": f"{('demo', 'other')[index % 2]}{text}",
        "ended": time.time() - 7.0 * index,
        "seconds": 0.3 + (index * 5 % 7),
        "ttft": 0.2 if index % 4 else None,
        "status": 200 if index % 4 else 503,
        "items": index % 3,
        "tokens": 5 * index,
        "pd_worker": "pd-0",
    }


def _request(index: int, text: str, now: float) -> dict[str, Any]:
    stage = STAGES[(index * 7 + int(now)) % 6]
    return {
        "id": f"{0xA1B2C3D4 + index * 7919:08x}",
        "model": f"demo{text}",
        "age": 0.2 * index + 0.1,
        "stage": stage,
        "items": index % 3,
        "items_ready": index % 2 if index % 3 else 0,
        "tokens": 5 * index if stage == "decode" else 0,
        "pd_worker": f"10.0.0.{20 + index % 2}:50052",
        "attempt": 1 + (index == 5),
    }
