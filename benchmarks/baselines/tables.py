"""The report's text, in Markdown, from matrices of cells. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.baselines.cell_results import (
    OTHERS_LIMIT,
    OURS,
    CellResults,
    cell_name,
    comparisons,
    cores_used,
    stage_times,
)
from benchmarks.result_page import number, ranged, spread, table
from triptych_bench.goodput.load.client import STAGES

_FIXED = ("attainment", "ttft", "tpot", "text_tpot")


def report(matrices: Sequence[CellResults], command: str) -> str:
    """The whole text; `command` writes it."""
    lines = ["# Baselines", "", *_machine(matrices, command)]
    for results in matrices:
        lines += ["", f"## {results.matrix['name']}: {results.matrix['about']}", ""]
        lines += _systems(results)
        for title, part in (
            ("Ratios and targets", _ratios(results)),
            ("Goodput by search (definition c)", _searches(results)),
            ("At a fixed rate", _fixed(results)),
            ("Closed loop", _capacity(results)),
            ("Where the time goes", _stages(results)),
            ("What is missing or doubtful", _doubts(results)),
        ):
            if part:
                lines += ["", f"### {title}", "", *part]
    return "\n".join(lines).rstrip() + "\n"


def _machine(matrices: Sequence[CellResults], command: str) -> list[str]:
    cells = [cell for results in matrices for cell in results.cells]
    if not cells:
        return ["Nothing is measured yet."]
    machines = [cell["machine"] for cell in cells]
    last = machines[-1]
    dates = sorted(cell["date"] for cell in cells)
    commits = sorted({machine["commit"] or "unknown" for machine in machines})
    starts = [machine["load_at_start"] for machine in machines]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    return [
        f"{last['chip']}, {last['cores']} cores, {last['memory_gib']:g} GiB; {dates[0]} to {dates[-1]} UTC; "
        f"commit {', '.join(commits)}; {versions}.",
        f"Load average when a run began: at most {max(starts):g}. Made by `python -m benchmarks baselines` "
        f"with the TOML files in `benchmarks/baselines/`, written by `{command}`. Cells are interleaved: "
        "repeat by repeat, load by load, system by system, every other repeat in reverse.",
        "Figures are medians over repeats with their range; a comparison is `better` or `worse` only when "
        "every repeat says so. Latencies are of completed requests, failures count as missed objectives.",
    ]


def _systems(results: CellResults) -> list[str]:
    rows = []
    for name, system in results.systems.items():
        cells = [cell for cell in results.cells if cell["cell"]["system"] == name and cell["server"]]
        starts = sorted({cell["server"]["seconds_to_ready"] for cell in cells})
        memory = [cell["memory_mb"] for cell in cells if cell["memory_mb"]]
        flags = f" `{' '.join(system['words'])}`" if system["words"] else ""
        rows.append((f"**{name}**", f"{system['about']}{flags}", spread(starts), spread(memory)))
    content = results.matrix.get("content")
    shown = ["", f"Pictures: {content}."] if content else []
    return [*table(("system", "what", "seconds to ready", "memory, MB"), rows, (0, 1)), *shown]


def _ratios(results: CellResults) -> list[str]:
    rows = [
        (
            f"{one.load}, {one.metric.title}",
            f"{OURS} / {one.against}",
            ranged(one.ratio.ratio, one.ratio.low, one.ratio.high),
            one.reading,
            one.target,
        )
        for one in comparisons(results)
    ]
    return table(("load, figure", "of", "ratio", "", "target"), rows, (0, 1, 3, 4)) if rows else []


def _searches(results: CellResults) -> list[str]:
    rows = []
    for load in results.measured_loads("search"):
        for system in results.measured_systems("search", load):
            values = results.values("goodput", load, system)
            cells = results.by_repeat("search", load, system).values()
            drifted = sum(cell["search"]["drifted"] for cell in cells)
            rows.append((f"{load}, {system}", spread([*values.values()]), str(len(values)), str(drifted)))
    return table(("load, system", "requests/s", "repeats", "of them drifted"), rows) if rows else []


def _fixed(results: CellResults) -> list[str]:
    lines: list[str] = []
    for load in results.measured_loads("fixed"):
        systems = results.measured_systems("fixed", load)
        cells = {name: results.by_repeat("fixed", load, name).values() for name in systems}
        rate = next(iter(cells[systems[0]]))["rate"]
        names = [name for name in _FIXED if any(results.values(name, load, system) for system in systems)]
        rows = []
        for system in systems:
            windows = [cell["windows"][0] for cell in cells[system]]
            figures = [spread([*results.values(name, load, system).values()]) for name in names]
            throughput = spread([window["request_throughput"] for window in windows])
            counts = [str(sum(window[field] for window in windows)) for field in ("num_prompts", "failed")]
            rows.append((system, *figures, throughput, *counts))
        head = ("system", *(results.metrics[name].title for name in names), "req/s", "sent", "failed")
        lines += [f"**{load}** at {rate:.3g} requests/s, SLO {results.matrix['loads'][load]}", ""]
        lines += [*table(head, rows), ""]
    return lines[:-1]


def _capacity(results: CellResults) -> list[str]:
    loads = results.measured_loads("capacity")
    if not loads:
        return []
    measured = {name: [results.values("capacity", load, name) for load in loads] for name in results.systems}
    rows = [
        (name, *(spread([*result.values()]) for result in values))
        for name, values in measured.items()
        if any(values)
    ]
    at_once = results.matrix["capacity"]["concurrency"]
    return [f"Requests/s with {at_once} at once.", "", *table(("system", *loads), rows)]


def _stages(results: CellResults) -> list[str]:
    lines: list[str] = []
    for load in results.measured_loads("fixed"):
        rows = []
        for system in results.measured_systems("fixed", load):
            result, (total, busiest) = stage_times(results, load, system), cores_used(results, load, system)
            times = [
                " / ".join(f"{1000 * seconds:.1f}" for seconds in result[stage]) if stage in result else "–"
                for stage in STAGES
            ]
            shares = ", ".join(f"{name} {share:.2f}" for name, share in busiest.items())
            rows.append((system, *times, number(total), shares))
        head = ("system", *STAGES, "cores used", "busiest processes")
        title = f"**{load}**, ms, median / P{results.matrix['tail']}"
        lines += [title, "", *table(head, rows), ""]
    return lines[:-1]


def _doubts(results: CellResults) -> list[str]:
    missing, failed, loaded = results.missing(), results.failed(), results.loaded()
    done = len(results.planned) - len(missing) - len(failed)
    lines = [f"- {done} of {len(results.planned)} cells are measured."]
    if missing:
        lines.append(f"- Not measured ({len(missing)}): {', '.join(missing)}.")
    for cell in failed:
        lines.append(f"- Failed: {cell_name(cell)}: {' '.join(cell['why'].split())[:300]}")
    if loaded:
        maximum = max(cell["others_share"] for cell in loaded)
        lines.append(
            f"- LOADED MACHINE: during {len(loaded)} cells other processes used more than "
            f"{OTHERS_LIMIT:.0%} of a core (at most {maximum:.2f} cores): their figures are no claim."
        )
    if unlike := results.unlike_requests():
        lines.append(f"- Requests of other lengths, by the server's usage: {', '.join(unlike)}.")
    if windows := [window for cell in results.cells for window in cell["windows"]]:
        share = max(window["client_cpu_share"] for window in windows)
        late = max(window["p99_late_ms"] or 0.0 for window in windows)
        lines.append(
            f"- The load generator sent at most {late:.1f} ms late at P99, and took at most {share:.0%} of a "
            "core. Where a system's threads take every core, it waits for one too."
        )
    return lines
