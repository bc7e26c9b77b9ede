"""Saves of encoder outputs into the embedding store."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

import torch

from triptych.base.errors import TriptychError
from triptych.base.log import log_fields, short
from triptych.ec_connector.base import ECTransferConfig, EncoderCacheMap, EncoderOutput
from triptych.ec_connector.connectors.device_copy import DeviceCopier
from triptych.ec_connector.connectors.host_buffers import bytes_of
from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.connectors.store_client import StoreClient

logger = logging.getLogger(__name__)


class StoreSaves:
    """The running saves, one per key; each keeps its tensor alive until it ends."""

    def __init__(
        self, config: ECTransferConfig, client: StoreClient, copier: DeviceCopier, reports: Reports
    ) -> None:
        self._config = config
        self._client = client
        self._copier = copier
        self._reports = reports
        self._lock = threading.Lock()
        self._saves: dict[str, Future[None]] = {}

    def begin(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str) -> None:
        """Starts the save of an entry, unless one of its key is running."""
        entry = encoder_cache[mm_hash]
        with self._lock:
            if mm_hash in self._saves:
                return
            try:
                host = self._copier.to_host(entry.data)
            except Exception as error:
                logger.exception(
                    "copy of %s to the host failed", short(mm_hash), extra=log_fields(mm_hash=mm_hash)
                )
                self._reports.unsaved(mm_hash, f"copy to the host failed: {error}")
                return
            saving = self._client.submit(self._save(entry, host, damaged_digest))
            self._saves[mm_hash] = saving
        saving.add_done_callback(lambda done: self._forget(mm_hash, done))

    async def _save(self, entry: EncoderOutput, host: torch.Tensor, damaged_digest: str) -> None:
        mm_hash, config = entry.plan.mm_hash, self._config
        try:
            async with asyncio.timeout(config.save_timeout):
                store = await self._client.store()
                await store.save(
                    entry.plan,
                    bytes_of(host),
                    ttl=config.ttl,
                    damaged_digest=damaged_digest,
                    producer=b"" if config.producers is None else config.producers.raw(mm_hash),
                )
        except TimeoutError:
            self._fail(mm_hash, f"not stored within {config.save_timeout:g} s")
        except TriptychError as error:
            self._fail(mm_hash, str(error))
        except Exception as error:
            logger.exception("save of %s failed", short(mm_hash), extra=log_fields(mm_hash=mm_hash))
            self._fail(mm_hash, f"unexpected: {error!r}")
        else:
            self._forget(mm_hash)
            self._reports.saved(mm_hash)

    def _fail(self, mm_hash: str, reason: str) -> None:
        self._forget(mm_hash)
        logger.warning("%s is not saved: %s", short(mm_hash), reason, extra=log_fields(mm_hash=mm_hash))
        self._reports.unsaved(mm_hash, reason)

    def _forget(self, mm_hash: str, done: Future[None] | None = None) -> None:
        """Removes a save: before its report, so that the engine may save again at once, and once `done`."""
        with self._lock:
            if done is None or self._saves.get(mm_hash) is done:
                self._saves.pop(mm_hash, None)

    def cancel(self) -> None:
        """Cancels all saves."""
        for saving in self._saves.copy().values():
            saving.cancel()
