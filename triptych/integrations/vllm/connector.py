"""TriptychECConnector: vLLM's EC connector interface over Triptych's store.

The only module that imports vLLM, which constructs it once in the scheduler and once in every
worker. It is an adapter: the park table decides, the loader and the saver move bytes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)
from vllm.distributed.parallel_state import get_tp_group

from triptych.base.machine.copy_stream import CopyStream
from triptych.base.machine.device import Device
from triptych.base.source_tickets import SourceTickets
from triptych.integrations.vllm.copy_loader import CopyLoader
from triptych.integrations.vllm.engine import (
    adopt_logging,
    check_engine,
    end_with_parent,
    row_width,
    shares_a_process,
)
from triptych.integrations.vllm.host_copies import CopyFolder, HostCopies, locked_pool
from triptych.integrations.vllm.mapped_copies import MappedCopies
from triptych.integrations.vllm.options import ConnectorOptions, parse_options
from triptych.integrations.vllm.park_table import ParkLimits, ParkTable
from triptych.integrations.vllm.progress_thread import let_wait, makes_agents
from triptych.integrations.vllm.requests import RequestItems, SaveOrder, needed_item, save_order
from triptych.integrations.vllm.rows import (
    CopySource,
    RowSaver,
    host_body,
    plan_to_save,
    read_rows,
    source_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

#: Steps beyond those that vLLM runs at once, after which no worker reads a copy any more.
_SPARE_STEPS = 2
#: Items whose save order a worker remembers.
_ORDERS = 4096


@dataclass
class StepOrders(ECConnectorMetadata):  # type: ignore[misc]
    """One step's orders from the scheduler to the workers."""

    loads: list[CopySource] = field(default_factory=list)
    #: Items that the step encodes.
    saves: list[SaveOrder] = field(default_factory=list)
    #: Items that new requests found in the encoder cache: saved again if the store has evicted them.
    republishes: list[SaveOrder] = field(default_factory=list)


class TriptychECConnector(ECConnectorBase):  # type: ignore[misc]
    """The connector. What a role does not need is None."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        adopt_logging(logging.getLogger("triptych"), logging.getLogger("vllm"))
        config = vllm_config.ec_transfer_config
        self._options = parse_options(config.ec_connector_extra_config)
        check_engine(
            vllm_config,
            is_consumer=self.is_consumer,
            is_producer=self.is_producer,
            trusts_clients=self._options.trusted_front_door,
            generic=self._options.engine_class == "generic",
        )
        self._scheduler: _SchedulerSide | None = None
        self._worker: _WorkerSide | None = None
        if role is ECConnectorRole.SCHEDULER:
            if self._options.ends_with_parent:
                end_with_parent()
            self._scheduler = _SchedulerSide(
                vllm_config, self._options, is_consumer=self.is_consumer, is_producer=self.is_producer
            )
        else:
            if _device().type == "cpu" and makes_agents(vllm_config.kv_transfer_config):
                _let_nixl_wait()
            self._worker = _WorkerSide(vllm_config, self._options, is_producer=self.is_producer)
        logger.info("TriptychECConnector: %s of an %s", role.name.lower(), config.ec_role)

    def has_cache_item(self, identifier: str) -> bool:
        assert self._scheduler is not None
        return self._scheduler.park is not None and self._scheduler.park.has_copy(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        assert self._scheduler is not None
        return self._scheduler.ensure(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        assert self._scheduler is not None
        return self._scheduler.park.take_unavailable() if self._scheduler.park is not None else set()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        assert self._scheduler is not None
        self._scheduler.scheduled(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        assert self._scheduler is not None
        return self._scheduler.end_step(scheduler_output.free_encoder_mm_hashes)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load(self._get_connector_metadata(), encoder_cache)

    def start_save_caches(self, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.republish(self._get_connector_metadata(), kwargs["encoder_cache"])

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.save(encoder_cache, mm_hash)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _device() -> torch.device:
    """The device of this process's worker."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, torch.cuda.current_device())
    return torch.device(current_platform.device_type)


def _let_nixl_wait() -> None:
    # By vLLM's name, which sets what NIXL reads from the environment at its import.
    from vllm.distributed.nixl_utils import NixlWrapper

    if NixlWrapper is not None:  # else vLLM says so, and ends
        let_wait(sys.modules[NixlWrapper.__module__].nixlBind)


class _SchedulerSide:
    """What the scheduler's connector holds: the park table of a consumer, the save orders of a producer."""

    def __init__(
        self, vllm_config: VllmConfig, options: ConnectorOptions, *, is_consumer: bool, is_producer: bool
    ) -> None:
        self._is_producer = is_producer
        # Of a consumer: a producer alone reads nothing.
        self._tickets = SourceTickets(options.token) if options.token and is_consumer else None
        self._encrypted = options.tls is not None
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)
        self._items = RequestItems(self._resolver.fields_for)
        self._seen: set[str] = set()
        self._saves: dict[str, SaveOrder] = {}
        self._republishes: dict[str, SaveOrder] = {}
        self._loader: CopyLoader | None = None
        self.park: ParkTable | None = None
        if is_consumer:
            folder, pool = None, None
            if not shares_a_process(vllm_config):
                folder = CopyFolder(options.host_folder)
            elif (device := _device()).type == "cuda":
                pool = locked_pool(options.host_memory_bytes, device)
            copies = HostCopies(options.host_memory_bytes, folder, pool)
            self._loader = CopyLoader(options, copies, options.row_width or row_width(vllm_config))
            limits = ParkLimits(
                wait=options.wait_seconds,
                media_wait=options.media_wait_seconds,
                settle_steps=vllm_config.max_concurrent_batches + _SPARE_STEPS,
                host_memory=options.host_memory_bytes,
            )
            self.park = ParkTable(self._loader, limits, time.monotonic)

    def ensure(self, request: Request, num_computed_tokens: int) -> bool:
        if self._is_producer and request.request_id not in self._seen:
            self._seen.add(request.request_id)
            for feature in request.mm_features:
                self._republishes[feature.identifier] = save_order(feature)
        if self.park is None:
            return True
        needed = self._items.needed(request, num_computed_tokens)
        if self._loader is not None and needed:
            self._loader.note(request.request_id, request.ec_transfer_params)
        return self.park.ensure(request.request_id, needed)

    def scheduled(self, request: Request, index: int) -> None:
        """The item gets its place in the encoder cache: it is loaded if there is a copy, else encoded."""
        feature = request.mm_features[index]
        if self.park is not None:
            self.park.engine_cache.allocated(feature.identifier, needed_item(feature, set()).size)
        if self.park is not None and self.park.has_copy(feature.identifier):
            self.park.use(feature.identifier)
        elif self._is_producer:
            self._saves[feature.identifier] = save_order(feature)

    def end_step(self, freed: list[str]) -> StepOrders:
        saves, self._saves = self._saves, {}
        again, self._republishes = self._republishes, {}
        return StepOrders(
            loads=[source_of(copy) for copy in self.park.end_step(freed)] if self.park is not None else [],
            saves=list(saves.values()),
            republishes=[order for identifier, order in again.items() if identifier not in saves],
        )

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets the request; the `ec_transfer_params` of its answer."""
        self._seen.discard(request.request_id)
        self._items.finished(request.request_id)
        if self._loader is not None:
            self._loader.forget(request.request_id)
        if self.park is not None:
            self.park.finished(request.request_id)
        answer: dict[str, Any] | None = None
        if self._tickets is not None:
            answer = self._tickets.answer(request.ec_transfer_params, encrypted=self._encrypted)
        if answer is not None or not self._is_producer:
            return answer
        return collect_ec_item_metadata(request.mm_features, self._resolver) or None

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


class _WorkerSide:
    """What a worker's connector holds: the saver of a producer."""

    def __init__(self, vllm_config: VllmConfig, options: ConnectorOptions, *, is_producer: bool) -> None:
        self._dtype = vllm_config.model_config.dtype
        self._namespace = options.namespaces[0]
        self._saver = RowSaver(options) if is_producer else None
        self._orders: OrderedDict[str, SaveOrder] = OrderedDict()
        #: Of copies to a GPU.
        self._stream: CopyStream | None = None
        self._mapped = MappedCopies()

    def load(self, orders: StepOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Copies this step's items into the encoder cache."""
        if not orders.loads:
            return
        device = _device()
        if self._stream is None and device.type == "cuda":
            self._stream = Device.of(device).copy_stream()
        for source in orders.loads:
            if source.identifier not in encoder_cache:
                rows = read_rows(source, device, self._dtype, self._stream, self._mapped)
                encoder_cache[source.identifier] = rows

    def republish(self, orders: StepOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Saves again what the encoder cache holds and the store has evicted."""
        for order in (*orders.saves, *orders.republishes):
            self._orders[order.identifier] = order
            self._orders.move_to_end(order.identifier)
        while len(self._orders) > _ORDERS:
            self._orders.popitem(last=False)
        for order in orders.republishes:
            if order.identifier in encoder_cache:
                self.save(encoder_cache, order.identifier)

    def save(self, encoder_cache: dict[str, torch.Tensor], identifier: str) -> None:
        """Starts the save of one entry, which all ranks have, from rank 0."""
        order = self._orders.get(identifier)
        if self._saver is None or order is None or get_tp_group().rank_in_group != 0:
            return
        rows = encoder_cache[identifier]
        plan = plan_to_save(order, self._namespace, rows)
        if plan is not None:
            self._saver.save(plan, host_body(rows))

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
