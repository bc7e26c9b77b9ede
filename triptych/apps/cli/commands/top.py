"""The command that watches a running cluster: `triptych top`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import msgspec

from triptych.apps.cli.commands.ask import ServerOptions
from triptych.apps.cli.options import configured
from triptych.apps.launch.secrets import password_in
from triptych.base.config.flags import flag
from triptych.base.errors import ConfigError, InternalError, NotFound, RequestError, Unauthorized
from triptych.base.types import prepared

if TYPE_CHECKING:
    from triptych.apps.client import Client
    from triptych.proxy.live.objects import ClusterSnapshot

_TIMEOUT = 10.0
#: Columns of what is no terminal.
_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class TopOptions(ServerOptions):
    """The options of `triptych top`."""

    api_key_file: str = flag("", "file that holds the key to send, in place of --api-key")
    once: bool = flag(False, "print what there is now, and end")
    json: bool = flag(False, "as JSON: one snapshot with --once, else one a line and second")


@click.command()
@configured(TopOptions)
def top(options: TopOptions) -> None:
    """Shows the workers, queues, requests and failures of a running cluster, updated every second.

    q or Ctrl-C ends it. --json prints what GET /cluster returns.
    """
    with _connected(options) as client, contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if options.json:
            _print_json(client, once=options.once)
            return
        from rich.console import Console

        from triptych.apps.cli.top.screen import Trends, end_keys, screen, watch

        console = Console()
        if console.is_terminal and not options.once:
            with end_keys() as pause:
                watch(lambda: _snapshot(client), console, pause)
            return
        width = console.width if console.is_terminal else _COLUMNS
        Console(width=width).print(screen(_snapshot(client), Trends(), width))


def _print_json(client: Client, *, once: bool) -> None:
    while True:
        sys.stdout.write(msgspec.json.encode(client.cluster()).decode() + "\n")
        sys.stdout.flush()
        if once:
            return
        time.sleep(1.0)


def _snapshot(client: Client) -> ClusterSnapshot:
    from triptych.proxy.live.objects import ClusterSnapshot

    try:
        return msgspec.convert(client.cluster(), prepared(ClusterSnapshot))
    except msgspec.ValidationError as error:
        raise InternalError(
            f"the proxy's live data are not those of this release ({error}): use its own `triptych top`"
        ) from None


@contextmanager
def _connected(options: TopOptions) -> Iterator[Client]:
    """A client of the proxy. An error ends the program with one sentence and exit code 1."""
    from triptych.apps.client import Client

    if options.api_key and options.api_key_file:
        raise ConfigError("--api-key and --api-key-file exclude each other: give one of them")
    key = options.api_key.partition(",")[0].strip()
    if options.api_key_file:
        key = password_in(options.api_key_file, "--api-key-file").strip()
    try:
        with Client(options.url, api_key=key, timeout=_TIMEOUT, retries=0, ca_file=options.ca_file) as client:
            yield client
    except RequestError as error:
        sys.exit(f"triptych: {error.message}{_advice(error)}")


def _advice(error: RequestError) -> str:
    if isinstance(error, Unauthorized):
        return " (--api-key, --api-key-file or TRIPTYCH_API_KEY)"
    if isinstance(error, NotFound):
        return ": the proxy has no live data; start it without --no-page, in this release"
    return ""
