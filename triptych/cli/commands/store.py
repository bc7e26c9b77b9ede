"""The commands about the store: `triptych store acl` and `triptych store check`."""

from __future__ import annotations

from dataclasses import dataclass

import click

from triptych.cli.options import configured
from triptych.config.flags import CommandOptions, flag


@click.group()
def store() -> None:
    """Prints the store's users, and checks a store."""


@dataclass(frozen=True, slots=True)
class AclOptions(CommandOptions):
    """The options of `triptych store acl`."""

    proxy_password_file: str = flag("", "file that holds the password of the user triptych-proxy")
    encoder_password_file: str = flag("", "file that holds the password of the user triptych-encoder")
    pd_password_file: str = flag("", "file that holds the password of the user triptych-pd")


@store.command(
    help="Prints an ACL file for Valkey or Redis 7 (`aclfile`): a user for each role, who may do what that "
    "role does and nothing else, with the SHA-256 of its password. Without its password's file a user cannot "
    "log in. Add a user for yourself: the default one is switched off."
)
@configured(AclOptions)
def acl(given: AclOptions) -> None:
    from triptych.ec_connector.access.acl import acl_lines, password_hash
    from triptych.launch.secrets.credentials import password_in

    files = {
        "proxy": given.proxy_password_file,
        "encoder": given.encoder_password_file,
        "pd": given.pd_password_file,
    }
    hashes = {
        role: password_hash(password_in(path, f"--{role}-password-file"))
        for role, path in files.items()
        if path
    }
    click.echo("\n".join(acl_lines(hashes)))
