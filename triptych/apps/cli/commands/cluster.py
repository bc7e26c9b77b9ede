"""The command that starts a whole cluster: `triptych serve`."""

from __future__ import annotations

import click
from click.core import ParameterSource

from triptych.apps.cli.grouped_command import service_command
from triptych.apps.cli.options import MODEL_HELP, configured, model_argument
from triptych.base.config import ServeConfig
from triptych.base.config.cluster import check_no_ray
from triptych.base.edges import load_edge
from triptych.base.errors import ConfigError


@service_command(help=f"Starts and supervises a whole cluster, on this machine or in Ray. {MODEL_HELP}")
@model_argument
@configured(ServeConfig)
def serve(config: ServeConfig) -> None:
    if config.launcher == "ray":
        ray = load_edge("triptych.apps.launch.ray.serve")
        if ray is None:
            raise ConfigError("--launcher ray: triptych.apps.launch.ray is not installed here")
        ray.serve_on_ray(config)
        return
    check_no_ray(config.ray)
    from triptych.apps.launch.serve import serve_cluster

    source = click.get_current_context().get_parameter_source
    given = [name for name in ("port", "grpc_port") if source(name) is not ParameterSource.DEFAULT]
    serve_cluster(config, frozenset(given))
