"""The commands: the whole cluster, each service alone, and two helpers for people."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from triptych import __version__
from triptych.cli.commands.bench import bench
from triptych.cli.commands.plan import plan
from triptych.cli.commands.profile import profile
from triptych.cli.commands.transcribe import transcribe
from triptych.cli.credentials import forget_variables, store_of
from triptych.cli.options import MODEL_HELP, build, config_options
from triptych.config import SHARING_FLAGS, ColocatedConfig, EncoderConfig, PDConfig, ProxyConfig
from triptych.log import setup_logging

C = TypeVar("C")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Serves multimodal models with the encoder taken apart from prefill and decode."""


def _start(service: str, values: dict[str, Any]) -> None:
    from triptych.cpu.affinity import pin
    from triptych.cpu.threads import thread_environment
    from triptych.launch.parent import die_with_parent

    forget_variables()
    die_with_parent()
    setup_logging(os.environ.get("TRIPTYCH_SERVICE", service), values["log_level"])
    pin(values.get("cpus", ""))
    thread_environment()


def _worker(config: type[C], values: dict[str, Any]) -> C:
    from triptych.config import check_advertise, check_bind, read_internal_token
    from triptych.errors import ConfigError
    from triptych.launch.model_path import model_name, resolve_model

    if not values["store"]:
        raise ConfigError("--store is missing: give the cluster's store, like redis://10.0.0.5:6379/0")
    token = read_internal_token(values["internal_token"], values["internal_token_file"])
    check_bind(values["host"], token)
    if values["advertise"]:
        check_advertise(values["advertise"])
    elif values["host"] in ("0.0.0.0", "::"):
        raise ConfigError(f"--host {values['host']} needs --advertise with an address that others can reach")
    path = resolve_model(values["model"])
    name = values["served_model_name"] or model_name(path)
    given = {"internal_token": token, "store": store_of(values)}
    return build(config, values, model=str(path), served_model_name=name, **given)


def _colocated(values: dict[str, Any]) -> ColocatedConfig:
    sides = {"encoder": _worker(EncoderConfig, values), "pd": _worker(PDConfig, values)}
    return build(ColocatedConfig, values, **sides)


@contextmanager
def _imports(model: str) -> Iterator[None]:
    """Around the import of a worker, which imports its checkpoint's model code too."""
    from triptych.models.preload import preload, quick_imports

    with quick_imports():
        preload(Path(model))
        yield


app.add_command(bench)
app.add_command(profile)
app.add_command(plan)
app.add_command(transcribe)


@app.command(help="Serves HTTP and gRPC and sends the work to the workers it finds in the store.")
@config_options(ProxyConfig)
def proxy(**values: Any) -> None:
    from triptych.config import read_internal_token
    from triptych.errors import ConfigError

    if not values["store"]:
        raise ConfigError("--store is missing: give the cluster's store, like redis://10.0.0.5:6379/0")
    token = read_internal_token(values["internal_token"], values["internal_token_file"])
    store = store_of(values)
    _start("proxy", values)
    import uvloop

    from triptych.proxy.service import run

    uvloop.run(run(build(ProxyConfig, values, internal_token=token, store=store)))


@app.command(help=f"Computes embeddings and saves them in the store. {MODEL_HELP}")
@click.argument("model", default="", envvar="TRIPTYCH_MODEL")
@config_options(EncoderConfig)
def encoder(**values: Any) -> None:
    _start("encoder", values)
    config = _worker(EncoderConfig, values)
    with _imports(config.model):
        from triptych.encoder_worker.service import run

    asyncio.run(run(config))


@app.command(help=f"Loads embeddings, prefills and decodes. {MODEL_HELP}")
@click.argument("model", default="", envvar="TRIPTYCH_MODEL")
@config_options(PDConfig)
def pd(**values: Any) -> None:
    _start("pd", values)
    config = _worker(PDConfig, values)
    with _imports(config.model):
        from triptych.pd_worker.service import run

    asyncio.run(run(config))


@app.command(help=f"Does the work of an encoder and of a PD worker in one process. {MODEL_HELP}")
@click.argument("model", default="", envvar="TRIPTYCH_MODEL")
@config_options(EncoderConfig, PDConfig, ColocatedConfig, without=SHARING_FLAGS)
def colocated(**values: Any) -> None:
    _start("colocated", values)
    config = _colocated(values)
    with _imports(config.pd.model):
        from triptych.colocated.service import run

    asyncio.run(run(config))


@app.command(help=f"Starts a whole cluster on this machine and watches over it. {MODEL_HELP}")
@click.argument("model", default="", envvar="TRIPTYCH_MODEL")
@click.option(
    "--demo",
    default=None,
    show_default="images, where no MODEL is given",
    envvar="TRIPTYCH_DEMO",
    show_envvar=True,
    type=click.Choice(["images", "audio"]),
    help="bundled model to serve: images answers questions about drawn shapes, audio writes dialled digits",
)
@config_options(
    EncoderConfig,
    PDConfig,
    ProxyConfig,
    without=("advertise", "store", "store_memory", "cpus", *SHARING_FLAGS),
)
@click.option(
    "--encoders",
    default=0,
    show_default="1; with --cpu-sharing pace one per core, up to 4",
    envvar="TRIPTYCH_ENCODERS",
    show_envvar=True,
    type=click.IntRange(0, 64),
    help="encoder workers",
)
@click.option(
    "--pd-workers",
    default=1,
    show_default=True,
    envvar="TRIPTYCH_PD_WORKERS",
    show_envvar=True,
    type=click.IntRange(1, 64),
    help="PD workers",
)
@click.option(
    "--topology",
    default="epd",
    show_default=True,
    envvar="TRIPTYCH_TOPOLOGY",
    show_envvar=True,
    type=click.Choice(["epd", "colocated"]),
    help="epd: encoders and PD workers; colocated: replicas that are both in one process",
)
@click.option(
    "--replicas",
    default=1,
    show_default=True,
    envvar="TRIPTYCH_REPLICAS",
    show_envvar=True,
    type=click.IntRange(1, 64),
    help="replicas of --topology colocated",
)
@click.option(
    "--cpus-per-worker",
    default=0,
    show_default=True,
    envvar="TRIPTYCH_CPUS_PER_WORKER",
    show_envvar=True,
    type=click.IntRange(0, 1024),
    help="cores of its own for each worker; 0: all share all",
)
@click.option(
    "--cpu-sharing",
    default="auto",
    show_default=True,
    envvar="TRIPTYCH_CPU_SHARING",
    show_envvar=True,
    type=click.Choice(["auto", "free", "pace"]),
    help="free: every step begins at once; pace: PD workers make fewer steps, with more sequences in each, "
    "while towers lack cores; auto: pace where encoders and PD workers share a CPU, else free",
)
@click.option(
    "--step-interval",
    default=0.02,
    show_default=True,
    envvar="TRIPTYCH_STEP_INTERVAL",
    show_envvar=True,
    type=click.FloatRange(0, 1),
    help="seconds between the beginnings of two steps while towers lack cores, with --cpu-sharing pace",
)
@click.option(
    "--encoder-threads",
    default=0,
    show_default="--threads; with --cpu-sharing pace all cores over all encoders",
    envvar="TRIPTYCH_ENCODER_THREADS",
    show_envvar=True,
    type=click.IntRange(0, 1024),
    help="torch threads of an encoder",
)
@click.option(
    "--store",
    default="auto",
    show_default=True,
    envvar="TRIPTYCH_STORE",
    show_envvar=True,
    help="auto starts one; else redis://host:port/0 or unix:///path/to/socket; one with a password rather "
    "by the variable than by the flag",
)
@click.option(
    "--store-memory",
    default="512 MiB",
    show_default=True,
    envvar="TRIPTYCH_STORE_MEMORY",
    show_envvar=True,
    help="memory of the store that auto starts",
)
@click.option(
    "--run-dir",
    default="",
    show_default="a new temporary folder",
    envvar="TRIPTYCH_RUN_DIR",
    show_envvar=True,
    help="folder for the store's socket and cluster.json (names and process ids); made for you alone",
)
def serve(**values: Any) -> None:
    from triptych.cli.commands.serve import serve_cluster

    serve_cluster(values)


@app.command()
@click.argument("name")
def key(name: str) -> None:
    """Makes an API key for NAME: the key, and the line for --api-key-file, which holds only its hash."""
    from triptych.proxy.auth.keys import new_key

    made, line = new_key(name)
    click.echo(f"The key, shown only now:  {made}", err=True)
    click.echo("The line for --api-key-file follows.", err=True)
    click.echo(line)


@app.command()
@click.argument("digits")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="WAV file to write",
)
def tones(digits: str, output: Path) -> None:
    """Writes the dial tones of DIGITS as a WAV file: what `triptych serve --demo audio` understands."""
    from triptych.cli.commands.tones import write_tones

    write_tones(digits, output)


@app.command()
@click.argument("question")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="picture file; may be given several times",
)
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    envvar="TRIPTYCH_URL",
    show_envvar=True,
    help="where the cluster answers",
)
@click.option("--max-tokens", default=256, show_default=True, help="longest answer")
@click.option("--api-key", default="", envvar="TRIPTYCH_API_KEY", show_envvar=True, help="key to send")
def ask(question: str, images: tuple[str, ...], url: str, max_tokens: int, api_key: str) -> None:
    """Asks a running cluster QUESTION and prints the answer as it comes."""
    from triptych.cli.commands.ask import ask_cluster

    # The variable may hold all the keys of a server.
    ask_cluster(question, list(images), url, max_tokens, api_key.partition(",")[0].strip())


@app.command(help=f"Says what MODEL is and whether it would fit. {MODEL_HELP}")
@click.argument("model", default="", envvar="TRIPTYCH_MODEL")
@config_options(
    EncoderConfig,
    PDConfig,
    without=(
        *("store", "store_password_file", "internal_token", "internal_token_file", "log_level"),
        *("metrics_port", "host", "port", "advertise", "cpus", *SHARING_FLAGS),
    ),
)
@click.option("--encoders", default=1, show_default=True, type=click.IntRange(1, 64), help="encoder workers")
@click.option("--pd-workers", default=1, show_default=True, type=click.IntRange(1, 64), help="PD workers")
@click.option(
    "--topology",
    default="epd",
    show_default=True,
    type=click.Choice(["epd", "colocated"]),
    help="as in serve",
)
@click.option("--replicas", default=1, show_default=True, type=click.IntRange(1, 64), help="replicas")
@click.option("--store-memory", default="512 MiB", show_default=True, help="memory of the store")
def check(**values: Any) -> None:
    from triptych.cli.commands.check import check_model

    check_model(values)
