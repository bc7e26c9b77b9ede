"""`triptych profile`: the costs of a model on this machine, for the simulator and the planner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from triptych.apps.cli.options import MODEL_HELP, configured, model_argument
from triptych.base.config.flags import CommandOptions, flag
from triptych.base.errors import ConfigError
from triptych.base.progress.choice import command_renderer
from triptych.base.progress.progress import shown_by


@dataclass(frozen=True, slots=True)
class ProfileArguments(CommandOptions):
    """The arguments and options of `triptych profile`."""

    model: str = ""
    device: str = flag("cpu", "torch device: cpu, cuda or cuda:N")
    dtype: str = flag(
        "auto", "dtype of weights and embeddings", choices=("auto", "float32", "bfloat16", "float16")
    )
    threads: int = flag(0, "torch threads of both sides; 0: as the workers choose")
    output: Path = flag(Path("profile.json"), "where the costs go")
    quick: bool = flag(False, "a small grid, in 40 seconds instead of three minutes")


@click.command(
    help="Measures the cost of each stage on this machine and writes a profile for the simulator. Takes "
    f"about three minutes with a small model. Needs the worker, embedded and bench extras. {MODEL_HELP}"
)
@model_argument
@configured(ProfileArguments)
def profile(given: ProfileArguments) -> None:
    from triptych.apps.launch.model_path import model_name, resolve_model
    from triptych.base.cpu.threads import thread_environment

    if not given.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {given.output}: there is no such folder")
    if given.threads < 0:
        raise ConfigError(f"--threads {given.threads} must be 0 or above")
    thread_environment()
    path = resolve_model(given.model)
    from triptych.simulator.profile.profile import ProfileOptions, measure, report, write_profile

    options = ProfileOptions(path, model_name(path), given.device, given.dtype, given.threads, given.quick)
    with shown_by(command_renderer()):
        found = measure(options)
    write_profile(given.output, found)
    click.echo(report(found))
    click.echo(f"wrote {given.output}")
