"""`triptych profile`: the command line of the measurement that the simulator and the planner start from."""

from __future__ import annotations

from pathlib import Path

import click

from triptych.cli.options import MODEL_HELP


@click.command(
    help="Measures what each stage costs on this machine and writes it down for the simulator: about "
    f"three minutes with a small model. Needs the worker, embedded and bench extras. {MODEL_HELP}"
)
@click.argument("model", default="", envvar="TRIPTYCH_MODEL")
@click.option("--device", default="cpu", show_default=True, help="torch device: cpu, cuda or cuda:N")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="dtype of weights and embeddings",
)
@click.option("--threads", default=0, help="torch threads of both sides; 0: as the workers choose")
@click.option(
    "--output",
    default="profile.json",
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="where the costs go",
)
@click.option("--quick", is_flag=True, help="a small grid, in 20 seconds instead of three minutes")
def profile(model: str, device: str, dtype: str, threads: int, output: Path, quick: bool) -> None:
    from triptych.cpu.threads import thread_environment
    from triptych.errors import ConfigError
    from triptych.launch.model_path import model_name, resolve_model

    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no such folder")
    if threads < 0:
        raise ConfigError(f"--threads {threads} must be 0 or above")
    thread_environment()
    path = resolve_model(model)
    from triptych.simulator.profile.profile import ProfileOptions, report, write_profile
    from triptych.simulator.profile.profile import profile as measure

    options = ProfileOptions(path, model_name(path), device, dtype, threads, quick)
    found = measure(options, lambda line: click.echo(f"measuring {line} …", err=True))
    write_profile(output, found)
    click.echo(report(found))
    click.echo(f"wrote {output}")
