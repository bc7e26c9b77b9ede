"""`triptych plan`: the command line of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from triptych.cli.commands.bench import check_extra, options_of, workload_of, workload_options
from triptych.errors import ConfigError

PLOTS = (".png", ".svg")


@click.command()
@workload_options()
@click.option("--slo", multiple=True, help='like "ttft:2000 tpot:50 e2el:8000", in ms; the preset\'s')
@click.option("--gpu", required=True, help="a100, h100, h200, or a file of `triptych profile`")
@click.option("--devices", default=4, show_default=True, help="devices that the ratio is sought for")
@click.option("--rate", default=0.0, help="requests per second to buy devices for")
@click.option("--price", type=float, help="dollars per hour and device; without it there are no costs")
@options_of(
    click.option("--scale", is_flag=True, help="how far up to 1000 workers go, and what is full first"),
    click.option("--store-bandwidth", default=0.0, help="GB/s of the store, for --scale; as measured"),
    click.option("--quick", is_flag=True, help="one load instead of --repeats, and no sensitivity"),
    click.option("--repeats", default=3, show_default=True, help="loads that the best shapes are tried with"),
    click.option("--seed", default=0, show_default=True, help="decides texts, pictures and times"),
    click.option("--json", "document", type=click.Path(path_type=Path, dir_okay=False), help="result file"),
    click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="picture, .png or .svg"),
)
def plan(**values: Any) -> None:
    """Says what to buy: the best ratio of encoders to PD workers, devices for a rate, costs. It simulates.

    Up to a minute or two on one core. Needs the `bench` extra.
    """
    check_extra()
    from rich.console import Console

    from triptych.simulator.plan.answer import Wanted, answer, write_document
    from triptych.simulator.plan.question import check_question
    from triptych.simulator.plan.tables import show

    question, wanted = (
        _question(values),
        Wanted(
            rate=_at_least_0(values, "rate"),
            sensitivity=not values["quick"],
            scale=values["scale"],
            store_rate=_at_least_0(values, "store_bandwidth") * 1e9,
        ),
    )
    check_question(question)
    _check_files(values)
    with Console(stderr=True).status("simulating") as status:
        found = answer(question, wanted, lambda told: status.update(f"simulating {told}"))
    console = Console()
    show(found, console)
    if values["document"]:
        write_document(values["document"], found)
        console.print(f"wrote {values['document']}", markup=False, highlight=False)
    if values["plot"]:
        from triptych.simulator.plan.plot import save

        save(found, values["plot"])
        console.print(f"wrote {values['plot']}", markup=False, highlight=False)


def _question(values: dict[str, Any]) -> Any:
    from triptych.goodput.load.workload import check_workload
    from triptych.goodput.measure.presets import preset
    from triptych.goodput.measure.slo import parse_slo
    from triptych.simulator.plan.question import Question, read_device

    workload = workload_of(values)
    check_workload(workload)
    return Question(
        workload=workload,
        workload_name=values["workload"],
        slo=parse_slo(values["slo"]) if values["slo"] else preset(values["workload"]).slo,
        device=read_device(values["gpu"], values["price"]),
        devices=values["devices"],
        seed=values["seed"],
        repeats=1 if values["quick"] else values["repeats"],
    )


def _at_least_0(values: dict[str, Any], name: str) -> float:
    value = float(values[name])
    if not 0 <= value < float("inf"):
        raise ConfigError(f"--{name.replace('_', '-')} {value:g} must be above 0")
    return value


def _check_files(values: dict[str, Any]) -> None:
    for flag, path in (("--json", values["document"]), ("--plot", values["plot"])):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no such folder")
    if values["plot"] is not None and values["plot"].suffix not in PLOTS:
        raise ConfigError(f"--plot {values['plot']} must end in {' or '.join(PLOTS)}")
