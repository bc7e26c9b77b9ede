"""The commands that need no cluster: `triptych key`, `cert`, `namespace` and `tones`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from triptych.apps.cli.options import configured
from triptych.base.config import ServiceConfig
from triptych.base.config.flags import CommandOptions, flag
from triptych.base.errors import ConfigError


@click.command()
@click.argument("name")
@click.option("--operator", is_flag=True, help="The key also sees all tenants' requests in the live data.")
def key(name: str, operator: bool) -> None:
    """Creates an API key for NAME; prints the key, and its line for --api-key-file with only the hash."""
    from triptych.proxy.auth.keys import new_key

    made, line = new_key(name, operator=operator)
    click.echo(f"The key, shown only now:  {made}", err=True)
    click.echo("The line for --api-key-file follows.", err=True)
    click.echo(line)


@dataclass(frozen=True, slots=True)
class CertOptions(CommandOptions):
    """The arguments and options of `triptych cert`."""

    folder: Path = Path()
    host: str = flag("", "names and addresses that clients connect to; several with commas", joined=True)
    name: str = flag(ServiceConfig().tls_name, "DNS name of the services among themselves: their --tls-name")
    days: int = flag(90, "days that the certificate is good for", minimum=1, maximum=825)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@configured(CertOptions)
def cert(options: CertOptions) -> None:
    """Creates a CA in FOLDER and a test certificate for all services; run again to renew the certificate."""
    from triptych.base.rpc.tls.own_ca import CA, CERT, KEY, write_certificates

    hosts = [host.strip() for host in options.host.split(",") if host.strip()]
    write_certificates(options.folder, hosts, options.name, options.days)
    paths = {"cert": options.folder / CERT, "key": options.folder / KEY, "ca": options.folder / CA}
    click.echo(f"Every service:  {' '.join(f'--tls-{name}-file {path}' for name, path in paths.items())}")
    click.echo(f"The proxy, too: --http-cert-file {paths['cert']} --http-key-file {paths['key']}")
    click.echo(f"Clients:        --ca-file {paths['ca']}")


@dataclass(frozen=True, slots=True)
class NamespaceOptions(CommandOptions):
    """The argument and options of `triptych namespace`; those are the encoder workers' own."""

    model: str = ""
    dtype: str = flag(
        "float32",
        "dtype of the encoder workers' embeddings, which their log names at the start",
        choices=("float32", "bfloat16", "float16"),
    )
    model_revision: str = flag("", "--model-revision of the encoder workers")
    quantization: str = flag(
        "none",
        "--quantization of the encoder workers",
        choices=("none", "int8", "int8-decoder", "w8a8", "w8a8-decoder"),
    )


@click.command()
@click.argument("model")
@configured(NamespaceOptions)
def namespace(options: NamespaceOptions) -> None:
    """Prints the namespace under which encoder workers of MODEL save embeddings.

    The connector for vLLM reads those of this namespace and no others.
    """
    from triptych.apps.launch.model_path import resolve_model
    from triptych.models.identity import model_identity

    identity = model_identity(
        resolve_model(options.model),
        dtype=options.dtype,
        revision=options.model_revision,
        quantization=options.quantization,
    )
    click.echo(identity.namespace)


@dataclass(frozen=True, slots=True)
class TonesOptions(CommandOptions):
    """The arguments and options of `triptych tones`."""

    digits: str = ""
    output: Path = flag(Path(), "WAV file to write", short="-o", required=True)


@click.command()
@click.argument("digits")
@configured(TonesOptions)
def tones(options: TonesOptions) -> None:
    """Writes the dial tones of DIGITS as a WAV file, for `triptych serve --demo audio` to transcribe."""
    write_tones(options.digits, options.output)


def write_tones(digits: str, output: Path) -> None:
    """Writes a WAV file; ConfigError for anything but 1 to 8 digits, or a file that cannot be written."""
    from triptych.demo.tones import DIGITS, LONGEST, tones_file

    if not 0 < len(digits) <= LONGEST or set(digits) - set(DIGITS):
        raise ConfigError(f"DIGITS={digits!r}: give 1 to {LONGEST} digits, like 5551234")
    try:
        output.write_bytes(tones_file(digits))
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}: name a file that can be written") from error
