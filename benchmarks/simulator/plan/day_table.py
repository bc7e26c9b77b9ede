"""A day with the scaling policy as people read it, by rich."""

from __future__ import annotations

from rich.console import Console

from triptych.simulator.plan.day import DayPlan
from triptych.simulator.plan.question import Question
from triptych.simulator.plan.tables import money, table_of


def show_day(found: DayPlan, question: Question, console: Console) -> None:
    """One row for each pool: encoders at most, encoder-seconds, shares of static peak's, TTFT, dollars."""
    shown = found.trace
    console.print(
        f"{shown.name}: {shown.seconds:.0f} s as a day, {found.requests} requests of "
        f"{question.workload_name}, {found.rate:g} requests/s at the peak, {shown.peak_to_mean:.1f} "
        f"times the mean; {question.slo}\nencoders: {question.encoders_on.name}",
        markup=False,
        highlight=False,
    )
    columns = ("pool", "most", "seconds", "share", "goodput", "P99 s", "failed", "a day")
    table = table_of("Encoders through the day", *columns)
    # It fits 80 columns.
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    static = found.rows[0]
    for row in found.rows:
        table.add_row(
            row.name,
            str(row.encoders),
            f"{row.worker_seconds:,.0f}",
            f"{row.worker_seconds / static.worker_seconds:.0%}",
            f"{row.good / static.good:.2%}" if static.good else "–",
            f"{row.ttft:.2f}",
            str(row.failures),
            money(row.dollars),
        )
    console.print(table)
    if found.rows[0].encoders == 1:
        console.print("One encoder is enough for the peak: only idle hours can be saved.", highlight=False)
