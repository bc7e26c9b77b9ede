"""`triptych doctor`: checks a machine, a store and a cluster before something goes wrong, or after."""

from __future__ import annotations

import logging
import sys

import click

from triptych.apps.cli.options import MODEL_HELP, configured, model_argument
from triptych.base.config import DoctorConfig


@click.command(
    help="Checks this machine, the given store and the given cluster for the flags of `triptych serve`. "
    f"Exits with 1 if a check fails; each failure names its remedy. {MODEL_HELP}"
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
