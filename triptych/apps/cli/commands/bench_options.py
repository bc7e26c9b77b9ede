"""The options of `triptych bench` and `triptych plan`, and what the goodput harness makes of them."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from triptych.base.config.flags import DAY, MOMENT, CommandOptions, flag, part
from triptych.base.errors import ConfigError

if TYPE_CHECKING:
    from triptych_bench.goodput.load.job import Target
    from triptych_bench.goodput.load.workload import Arrivals, Workload
    from triptych_bench.goodput.measure.slo import Slo
    from triptych_bench.goodput.measure.window import RunSettings
    from triptych_bench.goodput.run import Course, Output

T = TypeVar("T")
_CONTENTS = ("noise", "waves", "photos", "documents", "screenshots")


@dataclass(frozen=True, slots=True)
class WorkloadOptions(CommandOptions):
    """A preset of the workload, and what of it is changed."""

    workload: str = flag("mix", "see `triptych bench workloads`")
    text_tokens: int | None = flag(None, "tokens of a request's text", kind=int, minimum=1)
    text_spread: float | None = flag(None, "drawn from ± this share of it", kind=float, minimum=0, maximum=1)
    output_tokens: int | None = flag(None, "tokens of a reply", kind=int, minimum=1)
    output_spread: float | None = flag(
        None, "drawn from ± this share of it", kind=float, minimum=0, maximum=1
    )
    images: str = flag("", 'pictures of a request: 2, or weights like "0:0.8,1:0.2"')
    image_size: str = flag("", '640x640, or weights like "320x320:0.7,1280x720:0.3"')
    image_reuse: float | None = flag(
        None, "share of pictures shown before, 0 to 0.95", kind=float, minimum=0, maximum=0.95
    )
    image_content: str | None = flag(None, "what pictures show", choices=_CONTENTS)
    slo: tuple[str, ...] = flag((), 'like "ttft:500 tpot:50 e2el:8000", in ms; the preset\'s')

    def make_workload(self) -> Workload:
        """The preset's workload with the changes; ConfigError for one that makes no sense."""
        from triptych_bench.goodput.load.workload import check_workload, parse_images, parse_sizes
        from triptych_bench.goodput.measure.slo import preset

        base = preset(self.workload).workload
        workload = replace(
            base,
            text_tokens=_given(self.text_tokens, base.text_tokens),
            text_quantiles=base.text_quantiles if self.text_tokens is None else (),
            text_spread=_given(self.text_spread, base.text_spread),
            output_tokens=_given(self.output_tokens, base.output_tokens),
            output_quantiles=base.output_quantiles if self.output_tokens is None else (),
            output_spread=_given(self.output_spread, base.output_spread),
            reuse=_given(self.image_reuse, base.reuse),
            content=_given(self.image_content, base.content),
            images=parse_images(self.images) if self.images else base.images,
            sizes=parse_sizes(self.image_size) if self.image_size else base.sizes,
        )
        check_workload(workload)
        return workload

    def make_slo(self) -> Slo:
        """The limits, or the preset's."""
        from triptych_bench.goodput.measure.slo import parse_slo, preset

        return parse_slo(self.slo) if self.slo else preset(self.workload).slo


@dataclass(frozen=True, slots=True)
class LoadOptions(CommandOptions):
    """The load of a window."""

    preset: WorkloadOptions = part(WorkloadOptions)
    rate: tuple[float, ...] = flag((), "requests per second; several: a sweep", kind=float, minimum=0)
    arrivals: str = flag(
        "poisson", "when requests are sent", choices=("poisson", "gamma", "constant", "ramp")
    )
    burstiness: float = flag(1.0, "of gamma; below 1: in bursts", minimum=0)
    ramp_to: float = flag(0.0, "rate at the end of a ramp", minimum=0)
    trace: str = flag("", "replay this JSONL file, or Azure's LMM trace in CSV, instead of --workload")
    trace_speed: float = flag(1.0, "2 replays twice as fast", minimum=MOMENT)
    concurrency: int = flag(0, "closed loop: as many requests in flight", minimum=0)
    seconds: float = flag(60.0, "measured part of a window", minimum=MOMENT)
    requests: int = flag(0, "measured requests of a window, instead of --seconds", minimum=0)
    warm_up: float = flag(5.0, "seconds sent and not measured", minimum=0)
    timeout: float = flag(120.0, "seconds until a request fails", minimum=MOMENT, maximum=DAY)
    seed: int = flag(0, "decides texts, pictures and times", minimum=0)

    def make_arrivals(self) -> Arrivals:
        """The arrivals at the first rate; ConfigError where those at any rate are not possible."""
        from triptych_bench.goodput.load.workload import Arrivals, check_arrivals
        from triptych_bench.goodput.measure.slo import preset

        rates = self.rate or preset(self.preset.workload).rates[:1]
        all_of_them = [Arrivals(self.arrivals, rate, self.burstiness, self.ramp_to) for rate in rates]
        for one in all_of_them:
            check_arrivals(one)
        return all_of_them[0]


@dataclass(frozen=True, slots=True)
class TargetOptions(CommandOptions):
    """The server's API, and what it is asked for."""

    model: str = flag("", "served model name; the target's first by default")
    api_key: str = flag("", "key", variable="TRIPTYCH_API_KEY")
    ignore_eos: bool = flag(True, "ask for all")
    timings: bool = flag(True, "ask for stage times")
    first_token: str = flag(
        "chunk",
        "what counts as first; text for servers that send the role at once",
        choices=("chunk", "text"),
    )
    extra_body: str = flag("{}", "JSON object added to every request")
    words_per_token: float = flag(0.0, "of its tokenizer", shown="asked of the target", minimum=0)

    def make_target(self, url: str) -> Target:
        """The target at this URL."""
        from triptych_bench.goodput.load.job import Target

        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL: give one like http://127.0.0.1:8000")
        return Target(
            url=url.rstrip("/").removesuffix("/v1"),
            model=self.model,
            # The variable may hold all the keys of a server.
            api_key=self.api_key.partition(",")[0].strip(),
            ignore_eos=self.ignore_eos,
            timings=self.timings,
            first_token=self.first_token,
            extra=_json_object(self.extra_body),
        )


@dataclass(frozen=True, slots=True)
class OutputOptions(CommandOptions):
    """Where results go."""

    output: str = flag("goodput", "results go to OUTPUT.json and so on")
    name: str = flag("", "what plots and comparisons call this run")
    plots: str = flag("png", "their format", choices=("png", "svg", "none"))

    def make_output(self) -> Output:
        """The files to write."""
        from triptych_bench.goodput.run import Output

        text = self.output or f"goodput-{datetime.date.today()}"
        return Output(Path(text.removesuffix(".json")), self.plots, self.name)


@dataclass(frozen=True, slots=True)
class MeasureOptions(CommandOptions):
    """How servers are measured: the load, what is asked of them, the files with the results."""

    load: LoadOptions = part(LoadOptions)
    target_api: TargetOptions = part(TargetOptions)
    files: OutputOptions = part(OutputOptions)

    def make_settings(self, url: str) -> RunSettings:
        """The settings of the windows; ConfigError names the flag that cannot work."""
        from triptych_bench.goodput.measure.window import RunSettings

        load, workload = self.load, self.load.preset
        return RunSettings(
            target=self.target_api.make_target(url),
            workload=workload.make_workload(),
            workload_name=f"trace {Path(load.trace).name}" if load.trace else workload.workload,
            slo=workload.make_slo(),
            arrivals=load.make_arrivals(),
            trace=load.trace,
            trace_speed=load.trace_speed,
            concurrency=load.concurrency,
            seconds=load.seconds,
            requests=load.requests,
            warm_up=load.warm_up,
            timeout=load.timeout,
            seed=load.seed,
        )


@dataclass(frozen=True, slots=True)
class GoodputOptions(MeasureOptions):
    """The options of `triptych bench goodput`."""

    url: str = flag("", "a running server, like http://127.0.0.1:8000")
    launch: str = flag("", "start a cluster of this shape first: 1E1PD, 2E2PD …")
    launch_model: str = flag("", "its checkpoint folder; the demo model by default")
    launch_flags: str = flag("", "further flags of its `triptych serve`, in one string")
    sweep: bool = flag(False, "the preset's rates")
    search: bool = flag(False, "the highest rate that is sustained")
    search_windows: int = flag(3, "windows that vote on a rate", minimum=1)
    resolution: float = flag(0.05, "where the search ends", minimum=MOMENT, maximum=1)
    highest: float = flag(1000.0, "highest rate of the search", minimum=MOMENT)
    repeats: int = flag(1, "windows per rate", minimum=1)
    metrics: tuple[str, ...] = flag((), "/metrics pages whose queues to draw")

    def make_course(self) -> Course:
        """The windows to run."""
        from triptych_bench.goodput.measure.search import SearchLimits
        from triptych_bench.goodput.measure.slo import preset
        from triptych_bench.goodput.run import Course

        load, preset_rates = self.load, preset(self.load.preset.workload).rates
        open_loop = not load.concurrency and not load.trace
        if not open_loop and (load.rate or self.sweep or self.search):
            raise ConfigError("--concurrency and --trace go without --rate, --sweep and --search")
        if self.sweep and load.rate and not self.search:
            raise ConfigError("--sweep has the preset's rates: leave --rate out, or --sweep")
        if self.search_windows % 2 == 0:
            raise ConfigError("--search-windows must be odd, so that a majority decides")
        rates = preset_rates if self.sweep else load.rate
        if not self.search:
            return Course(rates, self.repeats)
        limits = SearchLimits(
            start=min(load.rate[0] if load.rate else preset_rates[0], self.highest),
            highest=self.highest,
            resolution=self.resolution,
            windows=self.search_windows,
        )
        return Course(rates if self.sweep or len(load.rate) > 1 else (), self.repeats, limits)


@dataclass(frozen=True, slots=True)
class AbFiles(OutputOptions):
    """Where the results of `triptych bench ab` go."""

    output: str = flag("ab", "results go to OUTPUT.json and so on")


@dataclass(frozen=True, slots=True)
class AbOptions(MeasureOptions):
    """The options of `triptych bench ab`."""

    files: OutputOptions = part(AbFiles)
    a: str = flag("", "URL of one server", required=True)
    b: str = flag("", "URL of the other", required=True)
    repeats: int = flag(3, "windows of each", minimum=1)


@dataclass(frozen=True, slots=True)
class CompareOptions(CommandOptions):
    """The arguments and options of `triptych bench compare`."""

    first: Path = Path()
    second: Path = Path()
    output: str = flag("", "draw plots of both as OUTPUT-*.png")
    plots: str = flag("png", "their format", choices=("png", "svg"))


def check_installed() -> None:
    """ModuleNotFoundError where triptych-bench is not installed; `CommandGroup` says what to do."""
    import matplotlib  # noqa: F401
    import numpy  # noqa: F401
    import PIL  # noqa: F401

    import triptych_bench  # noqa: F401


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return value
