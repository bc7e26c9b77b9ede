"""The answer as people read it, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from triptych_bench.simulator.plan.answer import MAX_SIMULATED, CapacityPlan
from triptych_bench.simulator.plan.ratios import Served, advise_roles
from triptych_bench.simulator.plan.scaling import SHARE, Bottleneck, Scaling
from triptych_bench.simulator.run import NOT_MODELLED

PARTS = {"proxy": "one proxy's CPU", "store": "the store's bandwidth", "registry": "the registry"}
#: Cells, and the style of the row.
Row = tuple[Sequence[str | Text], str]


def show(plan: CapacityPlan, console: Console) -> None:
    """Everything that was asked for."""
    console.print(Group(*_parts(plan)))


def _parts(plan: CapacityPlan) -> Iterator[RenderableType]:
    question = plan.question
    size = f"${question.budget:g} per hour of" if question.budget else f"{question.devices} x"
    yield Text(
        f"{question.workload_name} on {size} {question.devices_named}, {question.slo}; {_prices(plan)}\n"
        f"costs: {question.device.costs.source}"
    )
    names: tuple[str, ...]
    names = ("shape", "requests/s", "of loads", "bound by costs", "proxies", "per million", "per $")
    yield table("Highest sustained rate", names, (_served(plan, served) for served in plan.ratios.all))
    roles = advise_roles(plan.ratios).reason
    yield Text(f"{plan.ratios.verdict}\n{plan.advice.reason}\n{roles}", "bold")
    if plan.purchases:
        names = ("shape", "devices", "proxies", "per million", "held in simulation")
        yield table(f"For {plan.purchases[0].rate:g} requests/s", names, _purchases(plan))
    if plan.points:
        apart, replicas = plan.ratios.best.name, plan.ratios.replicas.name
        names = ("load", f"{apart}, requests/s", f"{replicas}, requests/s", "best by costs")
        yield table("When the load differs", names, _sensitivity(plan))
    if plan.scaling is not None:
        names = ("workers", "shape", "requests/s", "proxies", "store GB/s", "store", "registry")
        title = f"Scaling, by costs ({plan.scaling.of_bound:.0%} of the bound is served)"
        yield table(title, names, _scaling(plan.scaling))
        yield Text("\n".join(map(sentence, plan.scaling.bottlenecks)), "bold")
    if plan.hurried:
        yield Text("! windows at such rates are shorter than requests stay: rates may be too high", "yellow")
    yield Text(
        f"simulated {plan.requests} requests in {plan.windows} windows, {plan.seconds:.0f} s of CPU time, "
        f"seed {question.seed}\nnot modelled: {NOT_MODELLED}"
    )


def _prices(plan: CapacityPlan) -> str:
    device, encoder = plan.question.device, plan.question.encoder_device
    if device.hour is None:
        return "no --price, so no cost"
    unequal = f", ${encoder.hour:g} per encoder" if encoder is not None and encoder.hour is not None else ""
    return f"${device.hour:g} per hour and device{unequal}"


def table(title: str, columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """Figures stand at the right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for cells, style in rows:
        made.add_row(*cells, style=style)
    return made


def number(value: float | None) -> str:
    """Three digits, and never a power of ten."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(dollars: float | None) -> str:
    return "–" if dollars is None else f"${dollars:,.2f}"


def _served(plan: CapacityPlan, served: Served) -> Row:
    if served.skipped:
        return (served.name, "ruled out", "", number(served.bound), "", "", ""), "dim"
    spread = f"{number(min(served.rates))}–{number(max(served.rates))}" if len(served.rates) > 1 else ""
    rate, proxies = (number(served.rate), str(plan.proxies(served.rate))) if served.rate else ("none", "")
    prices = money(plan.dollars(served)), number(plan.per_dollar(served))
    best = served is plan.ratios.best and served.rate > 0
    return (served.name, rate, spread, number(served.bound), proxies, *prices), "bold" if best else ""


def _purchases(plan: CapacityPlan) -> Iterator[Row]:
    for one in plan.purchases:
        held = "yes" if one.confirmed else "no" if one.devices <= MAX_SIMULATED else "not tried: too many"
        counts = (str(one.devices), str(plan.proxies(one.rate)))
        yield (one.shape.name, *counts, money(one.dollars_per_million), held), ""


def _sensitivity(plan: CapacityPlan) -> Iterator[Row]:
    for point in plan.points:
        load = f"{point.value:.0%} {'with pictures' if point.kind == 'share' else 'reuse'}"
        rates = (number(rate) if rate else "none" for rate in (point.apart, point.replicas))
        yield (load, *rates, point.best), "bold" if point.given else ""


def _scaling(scaled: Scaling) -> Iterator[Row]:
    for point in scaled.curve:
        shares = [
            Text(f"{100 * share:,.{0 if share >= 0.1 else 1}f}%", style="red" if share > SHARE else "")
            for share in (point.shares["store"], point.shares["registry"])
        ]
        counts = str(point.workers), point.shape, number(point.rate), str(point.proxies or "no number does")
        yield (*counts, number(point.store_bytes_per_second / 1e9), *shares), ""


def sentence(one: Bottleneck) -> str:
    """Where a part is full."""
    if one.workers is None:
        return f"{PARTS[one.part]}: not met up to 1000 workers"
    more = f", with {one.proxies} proxies" if one.part == "registry" else ""
    return f"{PARTS[one.part]}: full from {one.workers} workers on, at {number(one.rate)} requests/s{more}"
