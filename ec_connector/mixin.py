"""What a model runner needs of the connector: one agent per worker process, and two calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from triptych.ec_connector.base import (
    ECConnectorOutput,
    ECConnectorRole,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
)
from triptych.ec_connector.factory import ECConnectorFactory

_EC_CONNECTOR_AGENT: ECConnectorWorker | None = None


def ensure_ec_transfer_initialized(
    config: ECTransferConfig | None, on_progress: Callable[[], None] | None = None
) -> None:
    """Makes this process's worker role, once; None makes none."""
    global _EC_CONNECTOR_AGENT
    if config is not None and _EC_CONNECTOR_AGENT is None:
        _EC_CONNECTOR_AGENT = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER, on_progress)


def is_ec_transfer_instance() -> bool:
    """Whether this process has a worker role."""
    return _EC_CONNECTOR_AGENT is not None


def get_ec_transfer() -> ECConnectorWorker:
    """This process's worker role; RuntimeError before `ensure_ec_transfer_initialized`."""
    if _EC_CONNECTOR_AGENT is None:
        raise RuntimeError("the EC connector is not initialized")
    return _EC_CONNECTOR_AGENT


def shutdown_ec_transfer() -> None:
    """Ends this process's worker role; a new one may be made after. Idempotent."""
    global _EC_CONNECTOR_AGENT
    agent, _EC_CONNECTOR_AGENT = _EC_CONNECTOR_AGENT, None
    if agent is not None:
        agent.shutdown()


class ECConnectorModelRunnerMixin:
    """For model runners of both kinds of worker. Without an agent both calls do nothing."""

    @staticmethod
    def maybe_save_ec_to_connector(
        encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = ""
    ) -> None:
        """Starts the save of an entry that was just encoded."""
        if is_ec_transfer_instance():
            get_ec_transfer().save_caches(encoder_cache, mm_hash, damaged_digest)

    @staticmethod
    @contextmanager
    def maybe_get_ec_connector_output(
        scheduler_output: Any, encoder_cache: EncoderCacheMap
    ) -> Iterator[ECConnectorOutput | None]:
        """Starts the step's transfers; what has finished is in the output once the body has ended.

        Reads `scheduler_output.ec_connector_metadata`. Yields None without an agent.
        """
        if not is_ec_transfer_instance():
            yield None
            return
        agent = get_ec_transfer()
        agent.metadata = scheduler_output.ec_connector_metadata
        output = ECConnectorOutput()
        try:
            if agent.metadata is not None:
                agent.start_load_caches(agent.metadata, encoder_cache)
            yield output
        finally:
            finished = agent.get_finished()
            for item in fields(ECConnectorOutput):
                setattr(output, item.name, getattr(finished, item.name))
            agent.metadata = None
