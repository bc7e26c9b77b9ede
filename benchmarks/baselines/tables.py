"""The report's text, in Markdown, from matrices of cells. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence

from benchmarks.baselines.cell_results import (
    BEFORE_FIRST_TOKEN,
    OTHERS_LIMIT,
    CellResults,
    Line,
    best_setting,
    busiest,
    cell_name,
    comparisons,
    cores_used,
    explain_loss,
    judge_target,
    planned_targets,
    stage_table,
)

_FIXED = ("attainment", "ttft", "tpot", "text_tpot")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[int] = (0,)) -> list[str]:
    """A Markdown table; the columns in `texts` are text, the rest numbers."""
    rules = ("---" if index in texts else "---:" for index in range(len(head)))
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(rules) + " |"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def number(value: float) -> str:
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Median, and the range where there is one."""
    if not values:
        return "–"
    middle, low, high = (number(value) for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} – {high})"


def report(matrices: Sequence[CellResults], command: str = "") -> str:
    """The whole text."""
    lines = ["# Baselines", ""]
    lines += _machine(matrices, command)
    for results in matrices:
        lines += ["", f"## {results.matrix['name']}: {results.matrix['about']}", ""]
        lines += _systems(results)
        for title, part in (
            ("Targets", _targets(results)),
            ("Wins and losses", _wins_and_losses(results)),
            ("Goodput by search (definition c)", _searches(results)),
            ("At a fixed rate", _fixed(results)),
            ("Ratios", _ratios(results)),
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
    lines = [
        f"{last['chip']}, {last['cores']} cores, {last['memory_gib']:g} GiB; {dates[0]} to {dates[-1]} UTC; "
        f"commit {', '.join(commits)}; {versions}.",
        f"Load average when a run began: at most {max(starts):g}. Made by `python -m benchmarks baselines` "
        "with the TOML files in `benchmarks/baselines/`"
        + (f", written by `{command}`" if command else "")
        + ". Cells are interleaved: repeat by repeat, load by load, system by system, every other repeat in "
        "reverse.",
        "Figures are medians over repeats with their range; a comparison is `better` or `worse` only when "
        "every repeat says so. Latencies are of completed requests, failures count as missed objectives.",
    ]
    return lines


def _systems(results: CellResults) -> list[str]:
    rows = []
    for name, system in results.systems.items():
        cells = [cell for cell in results.cells if cell["cell"]["system"] == name and cell["server"]]
        starts = sorted({cell["server"]["seconds_to_ready"] for cell in cells})
        memory = [cell["memory_mb"] for cell in cells if cell["memory_mb"]]
        flags = f" `{' '.join(system['words'])}`" if system["words"] else ""
        rows.append((f"**{name}**", f"{system['about']}{flags}", spread(starts), spread(memory)))
    return table(("system", "what", "seconds to ready", "memory, MB"), rows, (0, 1))


def _targets(results: CellResults) -> list[str]:
    rows, causes = [], []
    for target in planned_targets(results):
        outcome, title = judge_target(results, target), target.title.format(tail=results.matrix["tail"])
        metric = results.metrics[target.metric]
        against = results.role(target.against)
        sign = "≥" if metric.more_is_better else "≤"
        seen = "–"
        if not math.isnan(outcome.ratio):
            seen = f"{outcome.ratio:.2f} ({outcome.low:.2f} – {outcome.high:.2f})"
        rows.append((title, f"{sign} {target.need:g} x {against}", seen, f"**{outcome.state}**", outcome.by))
        if outcome.state == "missed":
            why = explain_loss(results, target.load, target.metric, against)
            causes.append(f"- {title}: the cause is {why or 'unknown: this load has no stage times'}.")
    if not rows:
        return []
    found = table(("target", "wanted", "measured", "", "distance"), rows, (0, 1, 3, 4))
    return found + (["", *causes] if causes else [])


def _wins_and_losses(results: CellResults) -> list[str]:
    lines = comparisons(results)
    if not lines:
        return ["Nothing to compare yet."]
    ours, found = results.role("ours"), []
    decided = {
        reading: [line for line in lines if line.reading == reading] for reading in ("better", "worse")
    }
    for title, some in decided.items():
        count = f"in {len(some)} of {len(lines)} comparisons:" if some else "in none."
        found += [f"{ours} is {title} {count}", ""]
        found += _by_load(results, some, title == "worse") + [""] * bool(some)
    found.append(f"Open: {len(lines) - sum(map(len, decided.values()))}.")
    return found


def _by_load(results: CellResults, lines: Sequence[Line], with_causes: bool) -> list[str]:
    """A point for each load and system compared with: its figures, and once each the cause of a loss."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.load, line.against), []).append(line)
    found = []
    for (load, against), group in groups.items():
        figures = [
            f"{results.metrics[line.metric].title.rpartition(', ')[0]} {line.ratio:.2f} x "
            f"({line.low:.2f} – {line.high:.2f})"
            for line in group
        ]
        text = f"- {load}, against {against}: {', '.join(figures)}"
        whys = (
            dict.fromkeys(explain_loss(results, load, line.metric, against) for line in group)
            if with_causes
            else {}
        )
        found.append(". ".join([text, *(why for why in whys if why)]) + ".")
    return found


def _searches(results: CellResults) -> list[str]:
    rows = []
    for load in results.measured_loads("search"):
        for system in results.measured_systems("search", load):
            values = results.values("goodput", load, system)
            cells = results.by_repeat("search", load, system).values()
            drifted = sum(cell["search"]["drifted"] for cell in cells)
            rows.append((f"{load}, {system}", spread(list(values.values())), str(len(values)), str(drifted)))
    return table(("load, system", "requests/s", "repeats", "of them drifted"), rows) if rows else []


def _fixed(results: CellResults) -> list[str]:
    lines: list[str] = []
    for load in results.measured_loads("fixed"):
        systems = results.measured_systems("fixed", load)
        cells = [cell for name in systems for cell in results.by_repeat("fixed", load, name).values()]
        names = [name for name in _FIXED if any(results.values(name, load, system) for system in systems)]
        lines += [f"**{load}** at {cells[0]['rate']:.3g} requests/s, SLO {results.matrix['loads'][load]}", ""]
        head = ("system", *(results.metrics[name].title for name in names), "req/s", "sent", "failed")
        rows = []
        for system in systems:
            windows = [cell["windows"][0] for cell in results.by_repeat("fixed", load, system).values()]
            figures = [spread(list(results.values(name, load, system).values())) for name in names]
            throughput = spread([window["request_throughput"] for window in windows])
            counts = [str(sum(window[field] for window in windows)) for field in ("num_prompts", "failed")]
            rows.append((system, *figures, throughput, *counts))
        lines += [*table(head, rows), ""]
    return lines[:-1]


def _ratios(results: CellResults) -> list[str]:
    ours = results.role("ours")
    rows = [
        (
            f"{line.load}, {results.metrics[line.metric].title}",
            f"{ours} / {line.against}",
            f"{number(line.ratio)} ({number(line.low)} – {number(line.high)})",
            line.reading,
        )
        for line in comparisons(results)
    ]
    return table(("load, figure", "of", "ratio", ""), rows, (0, 1, 3)) if rows else []


def _capacity(results: CellResults) -> list[str]:
    loads = results.measured_loads("capacity")
    if not loads:
        return []
    names = [
        name for name in results.systems if any(results.values("capacity", load, name) for load in loads)
    ]
    rows = [
        (name, *(spread(list(results.values("capacity", load, name).values())) for load in loads))
        for name in names
    ]
    lines = [
        f"Requests/s with {results.matrix['capacity']['concurrency']} at once.",
        "",
        *table(("system", *loads), rows),
    ]
    for load in loads:
        found = best_setting(results, load)
        if found is not None:
            best, share = found
            within = "within" if share >= 0.9 else "NOT within"
            base = results.role("colocated")
            lines += ["", f"{load}: {base} reaches {share:.0%} of its best setting ({best}): {within} 10 %."]
    return lines


def _stages(results: CellResults) -> list[str]:
    lines: list[str] = []
    tail = results.matrix["tail"]
    for load in results.measured_loads("fixed"):
        rows = []
        for system in results.measured_systems("fixed", load):
            times_of = stage_table(results, load, system)
            times = [
                f"{times_of[stage][0] * 1000:.1f} / {times_of[stage][1] * 1000:.1f}"
                if stage in times_of
                else "–"
                for stage in (*BEFORE_FIRST_TOKEN, "decode")
            ]
            shares = ", ".join(f"{name} {share:.2f}" for name, share in busiest(results, load, system))
            rows.append((system, *times, number(cores_used(results, load, system)), shares))
        head = ("system", *BEFORE_FIRST_TOKEN, "decode", "cores used", "busiest processes")
        lines += [f"**{load}**, ms, median / P{tail}", "", *table(head, rows), ""]
    return lines[:-1]


def _doubts(results: CellResults) -> list[str]:
    lines = []
    missing, failed, loaded = results.missing(), results.failed(), results.loaded()
    done = len(results.planned) - len(missing) - len(failed)
    lines.append(f"- {done} of {len(results.planned)} cells are measured.")
    if missing:
        lines.append(f"- Not measured ({len(missing)}): {', '.join(_grouped(missing))}.")
    for cell in failed:
        lines.append(f"- Failed: {cell_name(cell)}: {_one_line(cell['why'])}")
    if loaded:
        most = max(cell["others_share"] for cell in loaded)
        lines.append(
            f"- LOADED MACHINE: during {len(loaded)} cells other processes used more than "
            f"{OTHERS_LIMIT:.0%} of a core (at most {most:.2f} cores): their figures are no claim."
        )
    if unlike := results.unlike_requests():
        lines.append(f"- Requests of other lengths, by the server's usage: {', '.join(unlike)}.")
    if windows := [window for cell in results.cells for window in cell["windows"]]:
        share = max(window["client_cpu_share"] for window in windows)
        lines.append(
            f"- The load generator sent late at P99 by at most: {_lateness(results)}; it took at "
            f"most {share:.0%} of a core."
        )
    return lines


def _lateness(results: CellResults) -> str:
    """Beside each system: where its threads take every core, the generator waits for one too."""
    most: dict[str, float] = {}
    for cell in results.cells:
        system = cell["cell"]["system"]
        for window in cell["windows"]:
            most[system] = max(most.get(system, 0.0), window["p99_late_ms"] or 0.0)
    return ", ".join(f"{name} {most[name]:.1f} ms" for name in results.systems if name in most)


def _grouped(names: Sequence[str]) -> list[str]:
    """kind.load.system with its repeats together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        cell, _, repeat = name.rpartition(".")
        groups.setdefault(cell, []).append(repeat)
    return [f"{cell} ({', '.join(repeats)})" for cell, repeats in groups.items()]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
