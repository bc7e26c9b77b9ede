"""The EC connector of a model runner, worker role: saves, and loads around each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Literal, Protocol

from triptych.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorRole,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
    FailedLoad,
)
from triptych.ec_connector.factory import ECConnectorFactory

logger = logging.getLogger(__name__)


class HasConnectorMetadata(Protocol):
    """The part of a scheduler's output that a connector reads."""

    @property
    def ec_connector_metadata(self) -> ECConnectorMetadata | None: ...


class ECConnectorModelRunnerMixin:
    """A mixin for model runners with an optional EC connector. Without one both `maybe_` calls do nothing."""

    _ec_connector: ECConnectorWorker | None = None
    #: Drops of earlier steps whose transfers could not be started; the next step repeats them.
    _ec_undone: tuple[ECConnectorMetadata, ...] = ()

    def ensure_ec_transfer_initialized(
        self,
        config: ECTransferConfig,
        role: Literal[ECConnectorRole.WORKER],
        on_progress: Callable[[], None] | None = None,
    ) -> ECConnectorWorker:
        """This runner's connector, made by the factory at the first call; later calls return the same one."""
        if self._ec_connector is None:
            self._ec_connector = ECConnectorFactory.create_connector(config, role, on_progress)
        return self._ec_connector

    def is_ec_transfer_instance(self) -> bool:
        """Whether this runner has a connector."""
        return self._ec_connector is not None

    def get_ec_transfer(self) -> ECConnectorWorker:
        """This runner's connector; RuntimeError before `ensure_ec_transfer_initialized`."""
        if self._ec_connector is None:
            raise RuntimeError("the EC connector is not initialized")
        return self._ec_connector

    def shutdown_ec_transfer(self) -> None:
        """Ends the connector; a new one may be made after. Idempotent."""
        connector, self._ec_connector = self._ec_connector, None
        if connector is not None:
            connector.shutdown()

    def maybe_save_ec_to_connector(
        self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = ""
    ) -> None:
        """Starts the save of an entry that was just encoded."""
        if self._ec_connector is not None:
            self._ec_connector.save_caches(encoder_cache, mm_hash, damaged_digest)

    @contextmanager
    def maybe_get_ec_connector_output(
        self, scheduler_output: HasConnectorMetadata, encoder_cache: EncoderCacheMap
    ) -> Iterator[ECConnectorOutput | None]:
        """Starts the step's transfers; when the body ends, the output has those that have finished.

        Loads that cannot be started are reported in it as failed, and the step continues. Yields None without
        a connector.
        """
        connector = self._ec_connector
        if connector is None:
            yield None
            return
        connector.metadata = scheduler_output.ec_connector_metadata
        output = ECConnectorOutput()
        try:
            failed = self._start_loads(connector, encoder_cache)
            yield output
        finally:
            finished = connector.get_finished()
            for item in fields(ECConnectorOutput):
                setattr(output, item.name, getattr(finished, item.name))
            connector.metadata = None
        output.failed.extend(FailedLoad(mm_hash, "not started") for mm_hash in failed)
        output.generations.update(failed)

    def ec_transfers_failed(self, error: Exception) -> None:
        """Hook for an error of starting a step's transfers; the step continues if it returns."""

    def _start_loads(self, connector: ECConnectorWorker, encoder_cache: EncoderCacheMap) -> dict[str, int]:
        """The generations of the loads that could not be started, by mm_hash."""
        metadata = connector.metadata
        if metadata is None:
            return {}
        try:
            for order in (*self._ec_undone, metadata):
                connector.start_load_caches(order, encoder_cache)
        except Exception as error:
            self.ec_transfers_failed(error)
            logger.exception("the transfers of step %d failed", metadata.step)
            self._ec_undone = (*self._ec_undone, metadata.without_loads())
            return dict(metadata.loads())
        self._ec_undone = ()
        return {}
