"""The command group `triptych`."""

from __future__ import annotations

import click

from triptych import __version__
from triptych.apps.cli.commands.ask import ask, transcribe
from triptych.apps.cli.commands.bench import bench
from triptych.apps.cli.commands.cluster import check, serve
from triptych.apps.cli.commands.doctor import doctor
from triptych.apps.cli.commands.local import cert, key, namespace, tones
from triptych.apps.cli.commands.plan import plan
from triptych.apps.cli.commands.profile import profile
from triptych.apps.cli.commands.services import colocated, encoder, pd, proxy
from triptych.apps.cli.commands.store import store
from triptych.apps.cli.commands.top import top
from triptych.apps.cli.extras import CommandGroup


@click.group(
    cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Serves multimodal models with the encoder disaggregated from prefill and decode."""


_COMMANDS = (
    *(serve, check, doctor, proxy, encoder, pd, colocated),
    *(ask, transcribe, top, key, cert, namespace, tones),
    *(bench, plan, profile, store),
)
for command in _COMMANDS:
    app.add_command(command)
