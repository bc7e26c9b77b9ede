"""The `triptych` command."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from triptych.apps.cli.app import app
from triptych.apps.cli.variables import misspelt, variables_of
from triptych.apps.launch.secrets import receive_secrets
from triptych.base.errors import ConfigError
from triptych.base.log import logs_json
from triptych.base.parent import CAUSE_VARIABLE, end_on_sigterm

#: Exit code of a command that cannot work as configured.
CONFIG_EXIT = 2


def main() -> None:
    """Runs the command line; what cannot work ends in one sentence and exit code 2, without a traceback."""
    end_on_sigterm(os.getpid())
    receive_secrets()
    for written, meant in misspelt(os.environ, variables_of(app)):
        sys.stderr.write(f"triptych: the variable {written} does nothing: did you mean {meant}?\n")
    try:
        app(prog_name="triptych")
    except ConfigError as error:
        if logs_json():
            logging.getLogger("triptych").critical("%s", error)
        else:
            sys.stderr.write(f"triptych: {error}\n")
        if file := os.environ.get(CAUSE_VARIABLE):
            Path(file).write_text(str(error), encoding="utf-8")
        sys.exit(CONFIG_EXIT)
