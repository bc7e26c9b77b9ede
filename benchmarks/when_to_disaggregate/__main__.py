"""What disaggregation is worth: equal devices, unequal ones, reuse, and published comparisons, simulated.

python -m benchmarks when_to_disaggregate --write
"""

from __future__ import annotations

import time
from pathlib import Path

from matplotlib import pyplot as plt

from benchmarks.result_page import RESULTS, fill, page_parser, publish, table
from benchmarks.when_to_disaggregate import devices, reports, reuse
from benchmarks.when_to_disaggregate.devices import Case
from triptych.goodput.report.plots import COLOURS
from triptych.simulator.plan.answer import CapacityPlan
from triptych.simulator.run import NOT_MODELLED

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def _save(name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    plt.savefig(FOLDER / f"when-to-disaggregate-{name}.png", dpi=110)
    plt.close()


def draw_equal(result: list[tuple[Case, CapacityPlan]]) -> None:
    """Bars per load: the best ratio, replicas in turn, replicas in-step, in parts of the best of them."""
    _, axis = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    labels = ("encoders and PD workers", "replicas, tower and decoder in turn", "replicas, tower in the step")
    for place, (_, plan) in enumerate(result):
        ratios = plan.ratios
        rates = [ratios.best.rate, ratios.replicas.rate, ratios.in_step.rate]
        for index, rate in enumerate(rates):
            left, height = place + 0.27 * (index - 1), rate / (max(rates) or 1)
            label = "" if place else labels[index]
            axis.bar(left, height, 0.25, color=COLOURS[index], label=label)
            axis.annotate(f"{rate:.3g}", (left, height), ha="center", va="bottom", fontsize=7)
    names = [f"{case.name}\nTPOT {case.tpot:g} ms" for case, _ in result]
    axis.set_xticks(range(len(result)), names, fontsize=8)
    axis.set(ylabel="of the highest", ylim=(0, 1.35), title="four A100: requests/s within the SLO")
    axis.legend(fontsize=8, ncols=3, loc="upper center")
    _save("equal")


def draw_devices() -> None:
    """Break-even prices per encoder device, in PD devices."""
    _, axes = plt.subplots(1, len(devices.LOADS), figsize=(8, 3.4), layout="constrained", sharey=True)
    for axis, (name, load) in zip(axes, devices.LOADS.items(), strict=True):
        for index, pd in enumerate(devices.PD_DEVICES):
            prices = [devices.price(load, pd, encoder) for encoder in devices.ENCODERS]
            axis.plot(devices.ENCODERS, prices, "o", color=COLOURS[index], label=f"PD on {pd}")
        axis.axhline(1, color="#555555", linestyle=":")
        axis.set(title=name, yscale="log", xlabel="encoder")
        axis.set_yticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("pays below this price,\nin PD devices")
    axes[0].legend(fontsize=8)
    _save("devices")


def draw_reuse(result: list[reuse.Point]) -> None:
    """Goodput against reuse, a panel per number of devices."""
    _, axes = plt.subplots(1, len(reuse.DEVICES), figsize=(10, 3.4), layout="constrained")
    for axis, count in zip(axes, reuse.DEVICES, strict=True):
        for index, system in enumerate(reuse.SYSTEMS):
            rates = [one.rate for one in result if (one.devices, one.system) == (count, system)]
            axis.plot(
                [100 * share for share in reuse.REUSES], rates, marker="o", color=COLOURS[index], label=system
            )
        axis.set(title=f"{count} A100", xlabel="pictures shown before, %", ylim=(0, None))
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("requests/s within the SLO")
    axes[0].legend(fontsize=7)
    _save("reuse")


PAGE = RESULTS / "when_to_disaggregate.md"


def reports_table() -> list[str]:
    result = {f"vllm#41567: {name}": cells for name, cells in reports.vllm().items()}
    result |= {f"llm-d: {name}": cells for name, cells in reports.kimi().items()}
    result |= {f"LMSYS: {name} at {rate:g}/s": cells for (name, rate), cells in reports.lmsys().items()}
    head = ["", "requests/s", "mean TTFT, TPOT, ms", "P99 TTFT, TPOT, ms"]
    rows = [[name, *cells] for name, cells in result.items()]
    return table([*head, "P50, P90, P99 of a request, ms"], rows)


def main() -> None:
    options = page_parser(__doc__, PAGE).parse_args()
    began = time.process_time()
    equal, reused = list(devices.plans()), list(reuse.points())
    tables = {
        "equal": devices.equal_table(equal),
        "prices": devices.price_table(),
        "checks": devices.checks(),
        "reuse": reuse.reuse_table(reused),
        "reports": reports_table(),
    }
    page = fill(
        "when_to_disaggregate",
        seconds=time.process_time() - began,
        not_modelled=NOT_MODELLED,
        **{name: "\n".join(lines) for name, lines in tables.items()},
    )
    publish(page, PAGE, write=options.write)
    if options.write:
        draw_equal(equal)
        draw_devices()
        draw_reuse(reused)
