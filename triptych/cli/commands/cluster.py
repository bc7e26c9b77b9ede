"""The commands about a whole cluster on this machine: `triptych serve` and `triptych check`."""

from __future__ import annotations

import click

from triptych.cli.options import MODEL_HELP, configured, model_argument
from triptych.config import ClusterConfig, ServeConfig


@click.command(help=f"Starts a whole cluster on this machine and watches over it. {MODEL_HELP}")
@model_argument
@configured(ServeConfig)
def serve(config: ServeConfig) -> None:
    from triptych.launch.serve import serve_cluster

    serve_cluster(config)


@click.command(help=f"Says what MODEL is and whether it would fit. {MODEL_HELP}")
@model_argument
@configured(ClusterConfig)
def check(config: ClusterConfig) -> None:
    from triptych.launch.check import check_model

    check_model(config)
