"""The commands that are one service each: `triptych proxy`, `encoder`, `pd` and `colocated`."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from triptych.apps.cli.grouped_command import service_command
from triptych.apps.cli.options import MODEL_HELP, configured, model_argument
from triptych.apps.launch.secrets import forget_variables, store_url
from triptych.base.config import (
    ColocatedConfig,
    EncoderConfig,
    PDConfig,
    ProxyConfig,
    ServiceConfig,
    WorkerConfig,
    check_advertise,
    check_bind,
    check_worker_encryption,
    read_internal_token,
)
from triptych.base.errors import ConfigError
from triptych.base.log import setup_logging

S = TypeVar("S", bound=ServiceConfig)
W = TypeVar("W", bound=WorkerConfig)


@service_command(
    help="Runs the proxy: serves HTTP and gRPC, and sends work to the workers registered in the store.",
)
@configured(ProxyConfig)
def proxy(config: ProxyConfig) -> None:
    config = _with_secrets(config)
    _start("proxy", config)
    import uvloop

    from triptych.proxy.service import run

    uvloop.run(run(config))


@service_command(
    help=f"Runs an encoder worker: computes embeddings and saves them in the store. {MODEL_HELP}",
)
@model_argument
@configured(EncoderConfig)
def encoder(config: EncoderConfig) -> None:
    _start("encoder", config)
    config = _with_model(config)
    with worker_imports(config.model):
        from triptych.encoder_worker.service import run

    asyncio.run(run(config))


@service_command(help=f"Runs a PD worker: loads embeddings, prefills and decodes. {MODEL_HELP}")
@model_argument
@configured(PDConfig)
def pd(config: PDConfig) -> None:
    _start("pd", config)
    config = _with_model(config)
    with worker_imports(config.model):
        from triptych.pd_worker.service import run

    asyncio.run(run(config))


@service_command(help=f"Runs a replica: an encoder worker and a PD worker in one process. {MODEL_HELP}")
@model_argument
@configured(ColocatedConfig)
def colocated(config: ColocatedConfig) -> None:
    _start("colocated", config.pd)
    config = replace(config, encoder=_with_model(config.encoder), pd=_with_model(config.pd))
    with worker_imports(config.pd.model):
        from triptych.apps.colocated import run

    asyncio.run(run(config))


def _start(service: str, config: ServiceConfig) -> None:
    """Prepares the process: secrets, logging, temporary files, cores and threads."""
    from triptych.base.cpu.threads import library_environment, pin, share_interpreter
    from triptych.base.machine.resources import check_temporary_folder
    from triptych.base.parent import die_with_parent

    forget_variables()
    die_with_parent()
    setup_logging(os.environ.get("TRIPTYCH_SERVICE", service), config.log_level, config.log_format)
    # Where a library breaks the process, its log tells in which call.
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(file=sys.__stderr__)
    check_temporary_folder()
    pin(config.cpus)
    library_environment()
    share_interpreter()


def _with_secrets(config: S) -> S:
    """The config with the token and the store's password read from their files."""
    if not config.store:
        raise ConfigError("--store is missing: give the cluster's store, like redis://10.0.0.5:6379/0")
    token = read_internal_token(config.internal_token, config.internal_token_file)
    return replace(config, internal_token=token, store=store_url(config.store, config))


def _with_model(config: W) -> W:
    """The config with its secrets and the model's folder; ConfigError when nothing could reach the worker."""
    from triptych.apps.launch.model_path import model_name, resolve_model

    config = _with_secrets(config)
    check_bind(config.host, config.internal_token)
    if config.advertise:
        check_advertise(config.advertise)
    elif config.host in ("0.0.0.0", "::"):
        raise ConfigError(f"--host {config.host} needs --advertise with an address that proxies can reach")
    check_worker_encryption(config.host, config)
    path = resolve_model(config.model)
    _check_model(path, config)
    return replace(config, model=str(path), served_model_name=config.served_model_name or model_name(path))


def _check_model(path: Path, config: WorkerConfig) -> None:
    """ConfigError for a model that this worker cannot serve, before torch is imported."""
    try:
        from triptych.models.checkpoint.first_checks import check_encoder_model, check_pd_model
        from triptych.pd_worker.frontend.first_checks import check_pd_flags
    except ImportError:
        return  # The worker's own import says what to install.
    if isinstance(config, EncoderConfig):
        check_encoder_model(path, config)
    elif isinstance(config, PDConfig):
        check_pd_model(path, config)
        check_pd_flags(config)


@contextmanager
def worker_imports(model: str) -> Iterator[None]:
    """Around the import of a worker, which imports its checkpoint's model code too."""
    from triptych.models.preload import preload, quick_imports

    with quick_imports():
        preload(Path(model))
        yield
