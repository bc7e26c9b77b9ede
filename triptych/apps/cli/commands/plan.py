"""`triptych plan`: the command line of the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from triptych.apps.cli.commands.bench_options import WorkloadOptions, check_installed
from triptych.apps.cli.options import MODEL_HELP, configured, model_argument
from triptych.base.config.flags import MOMENT, CommandOptions, flag, part
from triptych.base.errors import ConfigError
from triptych.base.progress import lines_on_stderr

if TYPE_CHECKING:
    from triptych_bench.simulator.plan.question import Question

PLOTS = (".png", ".svg")
REPEATS = 3
DEVICES = 4


@dataclass(frozen=True, slots=True)
class PlanOptions(CommandOptions):
    """The options of `triptych plan`."""

    load: WorkloadOptions = part(WorkloadOptions)
    model: str = flag(
        "",
        "checkpoint folder or config.json, whose sizes a named device is planned with",
        shown="Qwen3-VL-4B",
    )
    gpu: str = flag("", "a100, h100, h200, gb200, l4, l40s, b60, cpu, or a file of `triptych profile`")
    pd_gpu: str = flag("", "device of PD workers and replicas, where --gpu is not every worker's")
    encoder_gpu: str = flag("", "device of encoders; the PD workers'")
    pd_ranks: int = flag(1, "ranks of a PD worker (--tensor-parallel), a device each", minimum=1, maximum=64)
    pd_rank_speed: float = flag(
        1.0, "how many times as fast as one rank's the steps of --pd-ranks are", minimum=MOMENT
    )
    devices: int = flag(DEVICES, "devices that the ratio is sought for", minimum=1)
    rate: float = flag(0.0, "requests per second to buy devices for", minimum=0)
    price: str = flag("", "dollars per hour and device: 1.5, or a100=1.5,b60=0.4; without it no costs")
    budget: float = flag(0.0, "dollars per hour that a shape may cost, instead of --devices", minimum=0)
    scale: bool = flag(False, "how far up to 1000 workers go, and what is full first")
    store_bandwidth: float = flag(0.0, "GB/s of the store, for --scale; as measured", minimum=0)
    kv_bandwidth: float = flag(
        0.0,
        "GB/s of KV from prefill to decode workers, as by NIXL; 0: by the store, as it was measured",
        minimum=0,
    )
    quick: bool = flag(False, "one load instead of --repeats, and no sensitivity")
    repeats: int = flag(REPEATS, "loads that the best shapes are tried with", minimum=1)
    seed: int = flag(0, "decides texts, pictures and times", minimum=0)
    json: Path | None = flag(None, "result file", kind=Path)
    plot: Path | None = flag(None, "picture, .png or .svg", kind=Path)


@click.command()
@configured(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Simulates a load to find the best ratio of encoders to PD workers, the devices it needs and their cost.

    Takes up to two minutes on one core. Needs `pip install triptych-bench`.
    """
    check_installed()
    from rich.console import Console

    from triptych_bench.simulator.plan.answer import answer, write_document
    from triptych_bench.simulator.plan.question import check_question
    from triptych_bench.simulator.plan.tables import show

    question = _question(options)
    rate = options.rate
    store_rate = options.store_bandwidth * 1e9
    check_question(question)
    _check_beside(options)
    _check_files(options)
    with lines_on_stderr():
        result = answer(
            question, rate=rate, sensitivity=not options.quick, scale=options.scale, store_rate=store_rate
        )
    console = Console()
    show(result, console)
    if options.json:
        write_document(options.json, result)
        console.print(f"wrote {options.json}", markup=False, highlight=False)
    if options.plot:
        from triptych_bench.simulator.plan.plot import save

        save(result, options.plot)
        console.print(f"wrote {options.plot}", markup=False, highlight=False)


def _question(options: PlanOptions) -> Question:
    from triptych_bench.simulator.costs.model_config import QWEN3_VL, read_model
    from triptych_bench.simulator.plan.question import Question, parse_prices, read_device

    pd, encoder = options.pd_gpu or options.gpu, options.encoder_gpu or options.gpu
    if not pd:
        raise click.UsageError("Missing option '--gpu', or '--pd-gpu' with '--encoder-gpu'.")
    if options.gpu and options.pd_gpu and options.encoder_gpu:
        raise ConfigError("--gpu is every worker's device: leave it out beside --encoder-gpu and --pd-gpu")
    names = tuple(dict.fromkeys(name.lower() for name in (pd, encoder or pd)))
    kv_bandwidth = options.kv_bandwidth * 1e9
    prices = parse_prices(options.price, names)
    served = read_model(Path(options.model)) if options.model else QWEN3_VL
    unequal = len(names) > 1
    encoder_flag = "--encoder-gpu" if options.encoder_gpu else "--gpu"
    device = read_device(
        pd,
        prices.get(names[0]),
        "--pd-gpu" if options.pd_gpu else "--gpu",
        options.pd_ranks,
        options.pd_rank_speed,
        served,
    )
    return Question(
        workload=options.load.make_workload(),
        workload_name=options.load.workload,
        slo=options.load.make_slo(),
        device=replace(device, limits=replace(device.limits, kv_bandwidth=kv_bandwidth)),
        devices=options.devices,
        seed=options.seed,
        repeats=1 if options.quick else options.repeats,
        encoder_device=(
            read_device(encoder, prices.get(names[-1]), encoder_flag, served=served) if unequal else None
        ),
        budget=options.budget,
    )


def _check_beside(options: PlanOptions) -> None:
    """What is given counts: ConfigError for an option that another one leaves without an effect."""
    if options.store_bandwidth and not options.scale:
        raise ConfigError("--store-bandwidth is asked for by --scale alone: add it, or leave this out")
    if options.budget and options.devices != DEVICES:
        raise ConfigError("--budget is in place of --devices: leave one of them out")
    if options.quick and options.repeats != REPEATS:
        raise ConfigError("--quick tries one load: leave --repeats out, or --quick")


def _check_files(options: PlanOptions) -> None:
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no such folder")
    if options.plot is not None and options.plot.suffix not in PLOTS:
        raise ConfigError(f"--plot {options.plot} must end in {' or '.join(PLOTS)}")


@dataclass(frozen=True, slots=True)
class ProfileArguments(CommandOptions):
    """The arguments and options of `triptych profile`."""

    model: str = ""
    device: str = flag("cpu", "torch device: cpu, cuda or cuda:N")
    dtype: str = flag(
        "auto", "dtype of weights and embeddings", choices=("auto", "float32", "bfloat16", "float16")
    )
    threads: int = flag(0, "torch threads of both sides; 0: as the workers choose", minimum=0, maximum=1024)
    output: Path = flag(Path("profile.json"), "where the costs go")
    quick: bool = flag(False, "a small grid, in 40 seconds instead of three minutes")


@click.command(
    help="Measures the cost of each stage on this machine and writes a profile for the simulator. Takes "
    "about three minutes with a small model. Needs triptych-bench and the extras worker and embedded. "
    f"{MODEL_HELP}"
)
@model_argument
@configured(ProfileArguments)
def profile(given: ProfileArguments) -> None:
    from triptych.apps.launch.model_path import model_name, resolve_model
    from triptych.base.cpu.threads import library_environment

    if not given.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {given.output}: there is no such folder")
    library_environment()
    path = resolve_model(given.model)
    from triptych_bench.simulator.profile.profile import ProfileOptions, measure, report, write_profile

    options = ProfileOptions(path, model_name(path), given.device, given.dtype, given.threads, given.quick)
    with lines_on_stderr():
        result = measure(options)
    write_profile(given.output, result)
    click.echo(report(result))
    click.echo(f"wrote {given.output}")
