"""The commands that examine: `triptych check` and `doctor`, `triptych store check` and `acl`."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass

import click

from triptych.apps.cli.grouped_command import service_command
from triptych.apps.cli.options import MODEL_HELP, configured, model_argument
from triptych.base.config import MIB, DoctorConfig, ModelCheckConfig, ServiceConfig
from triptych.base.config.flags import CommandOptions, flag
from triptych.base.errors import ConfigError


@service_command(
    help="The model checks of `triptych doctor` alone: family, sizes and memory of MODEL, and whether it "
    f"fits this machine. {MODEL_HELP}",
)
@model_argument
@configured(ModelCheckConfig)
def check(config: ModelCheckConfig) -> None:
    from triptych.apps.doctor.finding import fail_of, table
    from triptych.apps.doctor.model import check_model

    results = []
    try:
        for result in check_model(config, config.model, config.pictures):
            results.append(result)
    except ConfigError as error:
        if results:
            sys.stdout.write(table([("model", [*results, fail_of("model", error)])]))
        raise
    sys.stdout.write(table([("model", results)]) + "It fits.\n")


@service_command(
    help="Checks this machine, the given store and the given cluster for the flags of `triptych serve`; with "
    "--cluster, what a release in Kubernetes waits for. "
    f"Exits with 1 if a check fails; each failure names its remedy. {MODEL_HELP}",
)
@model_argument
@configured(DoctorConfig)
def doctor(config: DoctorConfig) -> None:
    from triptych.apps.doctor.finding import failed, table
    from triptych.apps.doctor.run import examine

    # What is wrong is in the table, once.
    logging.disable(logging.CRITICAL)
    try:
        groups = list(examine(config))
    finally:
        logging.disable(logging.NOTSET)
    sys.stdout.write(table(groups))
    if failed(groups):
        sys.exit(1)


@click.group()
def store() -> None:
    """Prints ACL users for the store, and checks a store."""


@dataclass(frozen=True, slots=True)
class AclOptions(CommandOptions):
    """The options of `triptych store acl`."""

    proxy_password_file: str = flag("", "file that holds the password of the user triptych-proxy")
    encoder_password_file: str = flag("", "file that holds the password of the user triptych-encoder")
    pd_password_file: str = flag("", "file that holds the password of the user triptych-pd")
    vllm_password_file: str = flag(
        "",
        "password file of triptych-vllm, the user of vLLM's connector; without it there is none",
    )


@store.command(
    help="Prints an ACL file for Valkey or Redis 7 (`aclfile`): one user per role, limited to what "
    "that role does, with the SHA-256 of its password. A user without a password file cannot log in. Add a "
    "user for yourself, because the default user is disabled."
)
@configured(AclOptions)
def acl(given: AclOptions) -> None:
    from triptych.apps.access import acl_lines, password_hash
    from triptych.apps.launch.secrets import password_in

    files = {
        "proxy": given.proxy_password_file,
        "encoder": given.encoder_password_file,
        "pd": given.pd_password_file,
        "vllm": given.vllm_password_file,
    }
    hashes = {
        role: password_hash(password_in(path, f"--{role}-password-file"))
        for role, path in files.items()
        if path
    }
    click.echo("\n".join(acl_lines(hashes)))


@dataclass(frozen=True, slots=True)
class CheckOptions(CommandOptions):
    """The argument and options of `triptych store check`."""

    url: str = ""
    store_password_file: str = flag("", "file that holds the store's password, in place of one in URL")
    store_ca_file: str = flag("", "CA certificates that verify a rediss:// store, as PEM")
    store_cert_file: str = flag("", "client certificate for the store, as PEM")
    store_key_file: str = flag("", "key of --store-cert-file, as PEM, unencrypted")
    bytes: int = flag(16 * MIB, "largest value written to measure the bandwidth", size=True, minimum=1)


@store.command(
    "check",
    help="The store checks of `triptych doctor` alone, of the store at URL (as in --store), and the "
    "bandwidth. Writes one value, with a hundredth of the store's memory at most, and "
    "deletes it. Exit code 1 where something failed.",
)
@click.argument("url", envvar="TRIPTYCH_STORE")
@configured(CheckOptions)
def store_check(given: CheckOptions) -> None:
    from triptych.apps.doctor.finding import failed, table
    from triptych.apps.doctor.store import check_store
    from triptych.apps.launch.secrets import store_url

    if not given.url or given.url == "auto":
        raise ConfigError("URL is missing: name the store, like redis://10.0.0.5:6379/0")
    files = ServiceConfig(
        store_password_file=given.store_password_file,
        store_ca_file=given.store_ca_file,
        store_cert_file=given.store_cert_file,
        store_key_file=given.store_key_file,
    )
    groups = asyncio.run(check_store(store_url(given.url, files), given.bytes))
    click.echo(table(groups), nl=False)
    sys.exit(int(failed(groups)))
