"""`triptych bench`: goodput of any OpenAI-compatible server, comparisons, two servers in turns."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.goodput.measure.settings import RunSettings
    from triptych.goodput.run import Course, Output

F = TypeVar("F", bound=Callable[..., Any])


def options_of(*found: Callable[[F], F]) -> Callable[[F], F]:
    """Options in the order of --help, as one decorator."""

    def decorate(function: F) -> F:
        for one in reversed(found):
            function = one(function)
        return function

    return decorate


def workload_options() -> Callable[[F], F]:
    """The preset, and what of it is changed."""
    return options_of(
        click.option("--workload", default="mix", show_default=True, help="see `triptych bench workloads`"),
        click.option("--text-tokens", type=int, help="tokens of a request's text"),
        click.option("--text-spread", type=float, help="drawn from ± this share of it"),
        click.option("--output-tokens", type=int, help="tokens of a reply"),
        click.option("--output-spread", type=float, help="drawn from ± this share of it"),
        click.option("--images", help='pictures of a request: 2, or weights like "0:0.8,1:0.2"'),
        click.option("--image-size", help='640x640, or weights like "320x320:0.7,1280x720:0.3"'),
        click.option("--image-reuse", type=float, help="share of pictures shown before, 0 to 0.95"),
        click.option("--image-content", type=click.Choice(["noise", "waves"]), help="what pictures show"),
    )


def _load_options() -> Callable[[F], F]:
    return options_of(
        workload_options(),
        click.option(
            "--arrivals",
            type=click.Choice(["poisson", "gamma", "constant", "ramp"]),
            default="poisson",
            show_default=True,
            help="when requests are sent",
        ),
        click.option("--burstiness", default=1.0, show_default=True, help="of gamma; below 1: in bursts"),
        click.option("--ramp-to", default=0.0, help="rate at the end of a ramp"),
        click.option("--trace", default="", help="replay this JSONL file instead of --workload"),
        click.option("--trace-speed", default=1.0, show_default=True, help="2 replays twice as fast"),
        click.option("--concurrency", default=0, help="closed loop: as many requests in flight"),
        click.option("--seconds", default=60.0, show_default=True, help="measured part of a window"),
        click.option("--requests", default=0, help="measured requests of a window, instead of --seconds"),
        click.option("--warm-up", default=5.0, show_default=True, help="seconds sent and not measured"),
        click.option("--timeout", default=120.0, show_default=True, help="seconds until a request fails"),
        click.option("--slo", multiple=True, help='like "ttft:500 tpot:50 e2el:8000", in ms; the preset\'s'),
        click.option("--seed", default=0, show_default=True, help="decides texts, pictures and times"),
    )


def _server_options() -> Callable[[F], F]:
    return options_of(
        click.option("--model", default="", help="served model name; the target's first by default"),
        click.option("--api-key", default="", envvar="TRIPTYCH_API_KEY", show_envvar=True, help="key"),
        click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="ask for all"),
        click.option("--timings/--no-timings", default=True, show_default=True, help="ask for stage times"),
        click.option(
            "--first-token",
            type=click.Choice(["chunk", "text"]),
            default="chunk",
            show_default=True,
            help="what counts as first; text for servers that send the role at once",
        ),
        click.option("--extra-body", default="{}", help="JSON object added to every request"),
        click.option(
            "--words-per-token", default=0.0, show_default="asked of the target", help="of its tokenizer"
        ),
    )


def _output_options(stem: str) -> Callable[[F], F]:
    return options_of(
        click.option("--output", default=stem, show_default=True, help="results go to OUTPUT.json and so on"),
        click.option("--name", default="", help="what plots and comparisons call this run"),
        click.option(
            "--plots",
            type=click.Choice(["png", "svg", "none"]),
            default="png",
            show_default=True,
            help="their format",
        ),
    )


@click.group()
def bench() -> None:
    """Measures goodput: load, limits, rate search, comparisons. Needs the `bench` extra."""


@bench.command()
def workloads() -> None:
    """Lists the workloads."""
    check_extra()
    from triptych.goodput.measure.presets import PRESETS

    for name, preset in PRESETS.items():
        load = preset.workload
        images = ", ".join(f"{count}: {weight:g}" for count, weight in load.images)
        rates = ", ".join(f"{rate:g}" for rate in preset.rates)
        size = f"{load.sizes[0][0]}x{load.sizes[0][1]}"
        click.echo(
            f"{name:15} {load.text_tokens} text, {load.output_tokens} output tokens; pictures ({images}) of "
            f"{size}, reuse {load.reuse:g}; {rates} per second; {preset.slo}"
        )


@bench.command()
@click.option("--target", default="", help="URL of a running server, without /v1")
@click.option("--launch", default="", help="start a cluster of this shape first: 1E1PD, 2E2PD …")
@click.option("--launch-model", default="", help="its checkpoint folder; the demo model by default")
@click.option("--launch-flags", default="", help="further flags of its `triptych serve`, in one string")
@click.option("--rate", "rates", multiple=True, type=float, help="requests per second; several: a sweep")
@click.option("--sweep", is_flag=True, help="the preset's rates")
@click.option("--search", "searching", is_flag=True, help="the highest rate that is sustained")
@click.option("--search-windows", default=3, show_default=True, help="windows that vote on a rate")
@click.option("--resolution", default=0.05, show_default=True, help="where the search ends")
@click.option("--highest", default=1000.0, show_default=True, help="highest rate of the search")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1), help="windows per rate")
@click.option("--metrics", "metrics_urls", multiple=True, help="/metrics pages whose queues to draw")
@_load_options()
@_server_options()
@_output_options("goodput")
def goodput(**values: Any) -> None:
    """Measures one server, and shows and writes figures and plots."""
    check_extra()
    from triptych.goodput.launch import launched, parse_shape
    from triptych.goodput.report.machine import load_average

    if bool(values["target"]) == bool(values["launch"]):
        raise ConfigError("give a server by --target, like http://127.0.0.1:8000, or a shape by --launch")
    load_before = load_average()
    if values["target"]:
        pages = values["metrics_urls"] or (f"{values['target'].rstrip('/')}/metrics",)
        _measure(values, values["target"], pages, load_before)
        return
    shape = parse_shape(values["launch"])
    # What is wrong with the flags is said before a cluster is started.
    _settings(values, "http://127.0.0.1")
    _course(values)
    with launched(shape, values["launch_model"], shlex.split(values["launch_flags"])) as cluster:
        pages = (*cluster.metrics_urls, *values["metrics_urls"])
        _measure(values, cluster.url, pages, load_before, cluster.startup)


def _measure(
    values: dict[str, Any],
    url: str,
    pages: Sequence[str],
    load_before: float,
    startup: dict[str, float] | None = None,
) -> None:
    from triptych.goodput.report.display import Display
    from triptych.goodput.run import Bench, ready, run_goodput

    display = Display()
    if startup is not None:
        display.say(", ".join(f"{name.replace('_', ' ')}: {value:.1f}" for name, value in startup.items()))
    settings = ready(_settings(values, url), values["words_per_token"])
    bench = Bench(settings, display, pages, load_before)
    with _told():
        run_goodput(bench, _course(values), _output(values), display, startup)


@bench.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--output", default="", help="draw plots of both as OUTPUT-*.png")
@click.option(
    "--plots", type=click.Choice(["png", "svg"]), default="png", show_default=True, help="their format"
)
def compare(a: Path, b: Path, output: str, plots: str) -> None:
    """Puts the results A.json and B.json side by side, with ratio and spread."""
    check_extra()
    from triptych.goodput.report.display import Display
    from triptych.goodput.run import Output, run_compare

    run_compare((a, b), Output(Path(output), plots) if output else None, Display())


@bench.command()
@click.option("--a", "target_a", required=True, help="URL of one server")
@click.option("--b", "target_b", required=True, help="URL of the other")
@click.option("--rate", "rates", multiple=True, type=float, help="requests per second")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="windows of each")
@_load_options()
@_server_options()
@_output_options("ab")
def ab(**values: Any) -> None:
    """Measures two servers in turns with the same requests; tells the ratio of medians with its range."""
    check_extra()
    from triptych.goodput.report.display import Display
    from triptych.goodput.run import Bench, ready, run_ab

    if len(values["rates"]) > 1:
        raise ConfigError("--rate: `bench ab` takes one rate")
    display = Display()
    benches = []
    for side in ("a", "b"):
        url = values[f"target_{side}"]
        settings = ready(_settings(values, url), values["words_per_token"])
        benches.append(Bench(settings, display, (f"{url.rstrip('/')}/metrics",)))
    with _told():
        run_ab(benches[0], benches[1], values["repeats"], _output(values), display)


@contextmanager
def _told() -> Iterator[None]:
    """What ends a run in its middle is said in a sentence; exit code 1."""
    from triptych.goodput.load.processes import LoadError

    try:
        yield
    except LoadError as error:
        raise click.ClickException(str(error)) from error


def check_extra() -> None:
    """ConfigError when the `bench` extra is not installed."""
    try:
        import matplotlib  # noqa: F401
        import numpy  # noqa: F401
        import PIL  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'triptych[bench]'") from error


def _settings(values: dict[str, Any], url: str) -> RunSettings:
    from triptych.goodput.load.arrivals import Arrivals, check_arrivals
    from triptych.goodput.load.job import Target
    from triptych.goodput.load.workload import check_workload
    from triptych.goodput.measure.presets import preset
    from triptych.goodput.measure.settings import RunSettings
    from triptych.goodput.measure.slo import parse_slo

    chosen = preset(values["workload"])
    workload = workload_of(values)
    check_workload(workload)
    rate = values["rates"][0] if values["rates"] else chosen.rates[0]
    arrivals = Arrivals(values["arrivals"], rate, values["burstiness"], values["ramp_to"])
    for one in values["rates"] or (rate,):
        check_arrivals(Arrivals(arrivals.kind, one, arrivals.burstiness, arrivals.ramp_to))
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL: give one like http://127.0.0.1:8000")
    target = Target(
        url=url.rstrip("/").removesuffix("/v1"),
        model=values["model"],
        api_key=values["api_key"].partition(",")[0].strip(),
        ignore_eos=values["ignore_eos"],
        timings=values["timings"],
        first_token=values["first_token"],
        extra=_extra_body(values["extra_body"]),
    )
    given = ("trace", "trace_speed", "concurrency", "seconds", "requests", "warm_up", "timeout", "seed")
    return RunSettings(
        target=target,
        workload=workload,
        workload_name=values["workload"] if not values["trace"] else f"trace {Path(values['trace']).name}",
        slo=parse_slo(values["slo"]) if values["slo"] else chosen.slo,
        arrivals=arrivals,
        **{name: values[name] for name in given},
    )


def workload_of(values: dict[str, Any]) -> Any:
    """The preset's workload with what the flags change."""
    from dataclasses import replace

    from triptych.goodput.load.workload import parse_images, parse_sizes
    from triptych.goodput.measure.presets import preset

    flags = {
        "text_tokens": values["text_tokens"],
        "text_spread": values["text_spread"],
        "output_tokens": values["output_tokens"],
        "output_spread": values["output_spread"],
        "reuse": values["image_reuse"],
        "content": values["image_content"],
        "images": parse_images(values["images"]) if values["images"] else None,
        "sizes": parse_sizes(values["image_size"]) if values["image_size"] else None,
    }
    changes = {name: value for name, value in flags.items() if value is not None}
    return replace(preset(values["workload"]).workload, **changes)


def _extra_body(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return found


def _course(values: dict[str, Any]) -> Course:
    from triptych.goodput.measure.presets import preset
    from triptych.goodput.measure.search import SearchLimits
    from triptych.goodput.run import Course

    preset_rates = preset(values["workload"]).rates
    open_loop = not values["concurrency"] and not values["trace"]
    if not open_loop and (values["rates"] or values["sweep"] or values["searching"]):
        raise ConfigError("--concurrency and --trace go without --rate, --sweep and --search")
    if values["search_windows"] % 2 == 0:
        raise ConfigError("--search-windows must be odd, so that a majority decides")
    if values["resolution"] <= 0:
        raise ConfigError("--resolution must be above 0")
    limits = None
    if values["searching"]:
        start = values["rates"][0] if values["rates"] else preset_rates[0]
        limits = SearchLimits(
            start=min(start, values["highest"]),
            highest=values["highest"],
            resolution=values["resolution"],
            windows=values["search_windows"],
        )
    rates = preset_rates if values["sweep"] else values["rates"]
    if values["searching"] and not values["sweep"] and len(values["rates"]) < 2:
        rates = ()
    return Course(tuple(rates), values["repeats"], limits)


def _output(values: dict[str, Any]) -> Output:
    from triptych.goodput.run import Output

    text = values["output"] or f"goodput-{datetime.date.today()}"
    return Output(Path(text.removesuffix(".json")), values["plots"], values["name"])
