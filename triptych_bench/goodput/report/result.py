"""Result files: JSON with the field names of `vllm bench serve --save-result` where they exist, and CSV."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.goodput.measure.figures import PERCENTILES, WindowFigures, summarise
from triptych_bench.goodput.measure.search import SearchResult
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.goodput.measure.window import MeasuredWindow
from triptych_bench.goodput.report.machine import Machine

FORMAT = "triptych-goodput/1"


def document(
    windows: Sequence[MeasuredWindow],
    machine: Machine,
    *,
    name: str = "",
    search: SearchResult | None = None,
    startup: dict[str, float] | None = None,
) -> JsonObject:
    """One run: where it was made, its settings, every window, the search."""
    first = windows[0].settings
    target = {key: value for key, value in asdict(first.target).items() if key != "api_key"}
    return {
        "format": FORMAT,
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "machine": asdict(machine) | {"loaded": machine.loaded},
        "target": target,
        "workload": {"name": first.workload_name} | asdict(first.workload),
        "slo": dict(first.slo.limits),
        "windows": [window_fields(window) for window in windows],
        "search": None if search is None else search_fields(search),
        "startup": startup,
    }


def window_fields(window: MeasuredWindow) -> JsonObject:
    """One window; latencies in ms where the name says so, else in seconds."""
    settings, figures = window.settings, window.figures
    measured = [record for record in window.report.records if not record.warm_up]
    open_loop = not settings.concurrency and not settings.trace
    return {
        "backend": "openai-chat",
        "label": settings.label,
        "model_id": settings.target.model,
        "num_prompts": figures.sent,
        "request_rate": settings.arrivals.rate if open_loop else None,
        "arrivals": settings.arrivals.kind if open_loop else None,
        "burstiness": settings.arrivals.burstiness if open_loop else None,
        "max_concurrency": settings.concurrency or None,
        "seed": window.seed,
        **scalar_fields(figures),
        "by_kind": kind_fields(measured, settings.slo),
        "sustained": window.verdict.sustained,
        "why_not_sustained": window.verdict.why,
        "ttft_growth_ms": window.drift.growth * 1000,
        "client_cpu_share": window.report.cpu_share,
        "doubts": list(window.doubts),
        "started": window.report.started,
        "input_lens": [record.prompt_tokens for record in measured],
        "output_lens": [record.output_tokens for record in measured],
        "ttfts": [record.ttft if record.ok else 0.0 for record in measured],
        "itls": [list(record.itls) for record in measured],
        "latencies": [record.e2e for record in measured],
        "start_times": [record.sent for record in measured],
        "queue_times": [record.stages.get("queue") for record in measured],
        "errors": [record.error for record in measured],
        "images": [record.images for record in measured],
        "stages": [dict(record.stages) for record in measured],
        "caches": [list(record.caches) for record in measured],
        "queue_depths": [
            {"at": sample.at - window.report.started, **sample.depths} for sample in window.queues
        ],
    }


def scalar_fields(figures: WindowFigures) -> JsonObject:
    """The numbers of a window, vLLM's first."""
    tokens = figures.prompt_tokens + figures.output_tokens
    result: JsonObject = {
        "duration": figures.duration,
        "completed": figures.completed,
        "failed": figures.failed,
        "total_input_tokens": figures.prompt_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.throughput,
        "request_goodput": figures.goodput,
        "output_throughput": figures.output_tokens / figures.duration,
        "total_token_throughput": tokens / figures.duration,
    }
    for name, spread in figures.spreads.items():
        result[f"mean_{name}_ms"] = spread.mean * 1000
        result[f"median_{name}_ms"] = spread.median * 1000
        result[f"std_{name}_ms"] = spread.std * 1000
        for rank, value in zip(PERCENTILES, spread.percentiles, strict=True):
            result[f"p{rank}_{name}_ms"] = value * 1000
    late = figures.lateness.percentiles
    return result | {
        "good": figures.good,
        "slo_attainment": figures.attainment,
        **{f"slo_attainment_{name}": share for name, share in figures.attainments.items()},
        **{f"p99_{name}_ms_with_failures": tail * 1000 for name, tail in figures.tails.items()},
        **{f"p{rank}_late_ms": value * 1000 for rank, value in zip(PERCENTILES, late, strict=True)},
    }


def kind_fields(measured: Sequence[RequestRecord], slo: Slo) -> dict[str, JsonObject]:
    """Latencies of requests without and with pictures apart, where a window has both; else nothing."""
    kinds = {
        "text": [record for record in measured if not record.images],
        "images": [record for record in measured if record.images],
    }
    if not all(kinds.values()):
        return {}
    result: dict[str, JsonObject] = {}
    for kind, records in kinds.items():
        figures = summarise(records, slo)
        fields = scalar_fields(figures)
        result[kind] = {"num_prompts": figures.sent, "failed": figures.failed} | {
            name: value for name, value in fields.items() if name.endswith("_ms") or name.startswith("slo_")
        }
    return result


def search_fields(search: SearchResult) -> JsonObject:
    """Definition (c) with its evidence."""
    return {
        "max_request_goodput": search.rate,
        "lowest_failing_rate": search.failing,
        "votes": list(search.votes),
        "drift": search.drift,
        "drifted": search.drifted,
        "trials": [
            {"rate": trial.rate, "passed": trial.passed, "windows": len(trial.verdicts)}
            for trial in search.trials
        ],
    }


def write_json(path: Path, result: JsonObject) -> None:
    """NaN and infinity become null, as JSON wants it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_finite(result)), indent=1) + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_csv(path: Path, result: JsonObject) -> None:
    """A row per window, without the lists of single requests."""
    rows = [
        {key: value for key, value in window.items() if not isinstance(value, list | dict)}
        for window in result["windows"]
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_result(path: Path, form: str = FORMAT, origin: str = "`triptych bench goodput`") -> JsonObject:
    """ConfigError for what is no result of this `form` and `origin`."""
    try:
        result = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(result, dict) or result.get("format") != form:
        raise ConfigError(f"{path} is no result of {origin} ({form})")
    return result
