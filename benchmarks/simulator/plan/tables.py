"""The answer as people read it, by rich."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from triptych.simulator.plan.answer import CapacityPlan, Scaling
from triptych.simulator.plan.purchase import MOST_SIMULATED
from triptych.simulator.plan.ratios import Served
from triptych.simulator.plan.scaling import SHARE, Bottleneck

PARTS = {"proxy": "one proxy's CPU", "store": "the store's bandwidth", "registry": "the registry"}


def show(found: CapacityPlan, console: Console) -> None:
    """Everything that was asked for."""
    console.print(Group(*_parts(found)))


def _parts(found: CapacityPlan) -> Iterator[RenderableType]:
    question = found.question
    size = f"${question.budget:g} per hour of" if question.budget else f"{question.devices} x"
    yield _text(
        f"{question.workload_name} on {size} {question.devices_named}, {question.slo}; {_prices(found)}\n"
        f"costs: {question.device.costs.source}"
    )
    yield ratios(found)
    yield _text(f"{found.ratios.verdict}\n{found.advice.reason}", bold=True)
    if found.purchases:
        yield purchases(found)
    if found.points:
        yield sensitivity(found)
    if found.scaling is not None:
        yield scaling(found.scaling)
        yield _text("\n".join(map(sentence, found.scaling.bottlenecks)), bold=True)
    if found.hurried:
        yield Text("! windows at such rates are shorter than requests stay: rates may be too high", "yellow")
    yield _text(
        f"simulated {found.requests} requests in {found.windows} windows, {found.seconds:.0f} s of CPU time, "
        f"seed {question.seed}"
    )


def _prices(found: CapacityPlan) -> str:
    device, encoder = found.question.device, found.question.encoder_device
    if device.hour is None:
        return "no --price, so no cost"
    unequal = f", ${encoder.hour:g} per encoder" if encoder is not None and encoder.hour is not None else ""
    return f"${device.hour:g} per hour and device{unequal}"


def _text(words: str, *, bold: bool = False) -> Text:
    return Text(words, style="bold" if bold else "")


def table_of(title: str, *columns: str) -> Table:
    """Empty; figures stand at the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    return table


def number(value: float) -> str:
    """Three digits, and never a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(dollars: float | None) -> str:
    return "–" if dollars is None else f"${dollars:,.2f}"


def ratios(found: CapacityPlan) -> Table:
    """Every ratio and the replicas, with what they serve."""
    table = table_of(
        "Highest sustained rate",
        *("shape", "requests/s", "of loads", "bound by costs", "proxies", "per million", "per $"),
    )
    for served in found.ratios.all:
        best = served is found.ratios.best and served.rate > 0
        words = _served_words(found, served)
        table.add_row(*words, style="bold" if best else "dim" if served.skipped else "")
    return table


def _served_words(found: CapacityPlan, served: Served) -> tuple[str, ...]:
    if served.skipped:
        return (served.name, "ruled out", "", number(served.bound), "", "", "")
    spread = f"{number(min(served.rates))}–{number(max(served.rates))}" if len(served.rates) > 1 else ""
    proxies = str(found.proxies(served.rate)) if served.rate else ""
    rate = number(served.rate) if served.rate else "none"
    each = found.per_dollar(served)
    return (
        *(served.name, rate, spread, number(served.bound), proxies),
        money(found.dollars(served)),
        number(each) if each is not None else "–",
    )


def purchases(found: CapacityPlan) -> Table:
    rate = found.purchases[0].rate
    table = table_of(
        f"For {rate:g} requests/s", "shape", "devices", "proxies", "per million", "held in simulation"
    )
    for one in found.purchases:
        held = "yes" if one.confirmed else "no" if one.devices <= MOST_SIMULATED else "not tried: too many"
        counts = (str(one.devices), str(found.proxies(one.rate)))
        table.add_row(one.shape.name, *counts, money(one.dollars_per_million), held)
    return table


def sensitivity(found: CapacityPlan) -> Table:
    apart, replicas = found.ratios.best.name, found.ratios.replicas.name
    table = table_of(
        "When the load differs", "load", f"{apart}, requests/s", f"{replicas}, requests/s", "best by costs"
    )
    for point in found.points:
        load = f"{point.value:.0%} with pictures" if point.kind == "share" else f"{point.value:.0%} reuse"
        rates = (number(rate) if rate else "none" for rate in (point.apart, point.replicas))
        table.add_row(load, *rates, point.best, style="bold" if point.given else "")
    return table


def scaling(found: Scaling) -> Table:
    table = table_of(
        f"Scaling, by costs ({found.of_bound:.0%} of the bound is served)",
        *("workers", "shape", "requests/s", "proxies", "store GB/s", "store", "registry"),
    )
    for point in found.curve:
        shares = (point.shares["store"], point.shares["registry"])
        table.add_row(
            str(point.workers),
            point.shape,
            number(point.rate),
            str(point.proxies or "no number does"),
            number(point.store_bytes_per_second / 1e9),
            *(
                Text(f"{100 * share:,.{0 if share >= 0.1 else 1}f}%", style="red" if share > SHARE else "")
                for share in shares
            ),
        )
    return table


def sentence(one: Bottleneck) -> str:
    """Where a part is full."""
    if one.workers is None:
        return f"{PARTS[one.part]}: not met up to 1000 workers"
    more = f", with {one.proxies} proxies" if one.part == "registry" else ""
    return f"{PARTS[one.part]}: full from {one.workers} workers on, at {number(one.rate)} requests/s{more}"
