"""The commands about a whole cluster on this machine: `triptych serve` and `triptych check`."""

from __future__ import annotations

import logging
import sys

import click
from click.core import ParameterSource

from triptych.apps.cli.options import MODEL_HELP, configured, model_argument
from triptych.base.config import ClusterConfig, DoctorConfig, ServeConfig
from triptych.base.config.cluster import check_no_ray
from triptych.base.errors import ConfigError


@click.command(help=f"Starts and supervises a whole cluster, on this machine or in Ray. {MODEL_HELP}")
@model_argument
@configured(ServeConfig)
def serve(config: ServeConfig) -> None:
    if config.launcher == "ray":
        from triptych.apps.launch.ray.serve import serve_on_ray

        serve_on_ray(config)
        return
    check_no_ray(config.ray)
    from triptych.apps.launch.serve import serve_cluster

    source = click.get_current_context().get_parameter_source
    given = [name for name in ("port", "grpc_port") if source(name) is not ParameterSource.DEFAULT]
    serve_cluster(config, frozenset(given))


@click.command(
    help="The model checks of `triptych doctor` alone: family, sizes and memory of MODEL, and whether it "
    f"fits this machine. {MODEL_HELP}"
)
@model_argument
@configured(ClusterConfig)
def check(config: ClusterConfig) -> None:
    from triptych.apps.doctor.finding import fail_of, table
    from triptych.apps.doctor.model import check_model

    results = []
    try:
        for result in check_model(config, config.model):
            results.append(result)
    except ConfigError as error:
        if results:
            sys.stdout.write(table([("model", [*results, fail_of("model", error)])]))
        raise
    sys.stdout.write(table([("model", results)]) + "It fits.\n")


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
