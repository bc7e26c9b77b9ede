"""`triptych bench`: goodput of any OpenAI-compatible server, comparisons, two servers in turns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from triptych.apps.cli.commands.bench_options import (
    AbOptions,
    CompareOptions,
    GoodputOptions,
    check_installed,
)
from triptych.apps.cli.options import configured
from triptych.base.errors import ConfigError
from triptych.base.progress import lines_on_stderr


@click.group()
def bench() -> None:
    """Measures goodput: load, limits, rate search, comparisons. Needs `pip install triptych-bench`."""
    click.get_current_context().with_resource(lines_on_stderr())


@bench.command()
def workloads() -> None:
    """Lists the workloads."""
    check_installed()
    from triptych_bench.goodput.measure.slo import PRESETS

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
@configured(GoodputOptions)
def goodput(options: GoodputOptions) -> None:
    """Measures one server, prints the results, and writes them with plots."""
    check_installed()
    from triptych_bench.goodput.launch import launched, parse_shape
    from triptych_bench.goodput.report.machine import load_average

    if bool(options.url) == bool(options.launch):
        raise ConfigError("give a server by --url, like http://127.0.0.1:8000, or a shape by --launch")
    load_before = load_average()
    # What cannot work is an error before anything is asked or started.
    options.make_course()
    if options.url:
        pages = options.metrics or (f"{options.url.rstrip('/')}/metrics",)
        _measure(options, options.url, pages, load_before)
        return
    shape = parse_shape(options.launch)
    options.make_settings("http://127.0.0.1")
    with launched(shape, options.launch_model, shlex.split(options.launch_flags)) as cluster:
        pages = (*cluster.metrics_urls, *options.metrics)
        _measure(options, cluster.url, pages, load_before, cluster.startup)


def _measure(
    options: GoodputOptions,
    url: str,
    pages: Sequence[str],
    load_before: float,
    startup: dict[str, float] | None = None,
) -> None:
    from triptych_bench.goodput.report.display import Display
    from triptych_bench.goodput.run import Bench, ready, run_goodput

    display = Display()
    if startup is not None:
        display.say(", ".join(f"{name.replace('_', ' ')}: {value:.1f}" for name, value in startup.items()))
    settings = ready(options.make_settings(url), options.target_api.words_per_token)
    measured = Bench(settings, display, pages, load_before)
    with _load_errors():
        run_goodput(measured, options.make_course(), options.files.make_output(), display, startup)


@bench.command()
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@configured(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Compares the results A.json and B.json: ratio and spread."""
    check_installed()
    from triptych_bench.goodput.report.display import Display
    from triptych_bench.goodput.run import Output, run_compare

    output = Output(Path(options.output), options.plots) if options.output else None
    run_compare((options.first, options.second), output, Display())


@bench.command()
@configured(AbOptions)
def ab(options: AbOptions) -> None:
    """Measures two servers alternately with the same requests: ratio of medians, with its range."""
    check_installed()
    from triptych_bench.goodput.report.display import Display
    from triptych_bench.goodput.run import Bench, ready, run_ab

    if len(options.load.rate) > 1:
        raise ConfigError("--rate: `bench ab` takes one rate")
    if options.load.rate and (options.load.concurrency or options.load.trace):
        raise ConfigError("--concurrency and --trace go without --rate")
    display = Display()
    benches = []
    for url in (options.a, options.b):
        settings = ready(options.make_settings(url), options.target_api.words_per_token)
        benches.append(Bench(settings, display, (f"{url.rstrip('/')}/metrics",)))
    with _load_errors():
        run_ab(benches[0], benches[1], options.repeats, options.files.make_output(), display)


@contextmanager
def _load_errors() -> Iterator[None]:
    """Turns an error that ends a run into one sentence and exit code 1."""
    from triptych_bench.goodput.load.generator import LoadError

    try:
        yield
    except LoadError as error:
        raise click.ClickException(str(error)) from error
