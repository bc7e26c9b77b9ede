"""KV blocks shared by prefix: what one PD worker has computed, all of its model find in the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from triptych.base.config import PDConfig, format_size
from triptych.base.errors import ConfigError
from triptych.base.metrics import PDMetrics
from triptych.models.base import DecoderSide
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.pd_worker.kv_sharing.block_loads import BlockLoads, OnEngine
from triptych.pd_worker.kv_sharing.block_saves import BlockSaves
from triptych.pd_worker.kv_sharing.cost_rule import CostRule
from triptych.pd_worker.kv_sharing.kv_copier import KVCopier
from triptych.pd_worker.kv_sharing.stored_kv import StoredKV
from triptych.pd_worker.kv_sharing.transfers import KVTransfers
from triptych.pd_worker.runner.model_runner import ModelRunner
from triptych.store.topology.location import parse_store

logger = logging.getLogger(__name__)


class PrefixSharing:
    """What one engine saves and loads of its KV cache.

    Blocks that arrive are as if they had been computed here and were idle: the scheduler finds them as it
    finds its own. What is lost, late, damaged or without room is computed.
    """

    def __init__(
        self,
        saves: BlockSaves | None,
        loads: BlockLoads | None,
        transfers: KVTransfers,
        rule: CostRule,
    ) -> None:
        self.saves = saves
        self._loads = loads
        self._transfers = transfers
        self._rule = rule

    def close(self) -> None:
        """Ends all transfers."""
        self._transfers.close()

    def look(self, request: EngineRequest, on_engine: OnEngine, add: Callable[[], None]) -> bool:
        """As `BlockLoads.begin`; False where this worker looks for nothing."""
        return self._loads is not None and self._loads.begin(request, on_engine, add)

    def arrived(self, request: EngineRequest) -> bool:
        """Whether the request still waits, and is to be added now. Engine's thread."""
        return self._loads is not None and self._loads.arrived(request)

    def drop(self, request_ids: Iterable[str] | None, proxy_id: str = "") -> list[EngineRequest]:
        """As `BlockLoads.drop`. Engine's thread."""
        return [] if self._loads is None else self._loads.drop(request_ids, proxy_id)

    def computed(self, output: SchedulerOutput) -> None:
        """A step's result is applied: saves what it has added to prompts. Engine's thread."""
        prefilled = sum(chunk.count for chunk in output.chunks if chunk.start < chunk.state.num_prompt_tokens)
        if not prefilled:
            return
        if 2 * prefilled > output.rows:
            self._rule.computed(prefilled, time.monotonic() - output.at)
        if self.saves is not None:
            self.saves.computed(output)


def prefix_sharing(
    config: PDConfig,
    decoder: DecoderSide,
    model_key: str,
    scheduler: Scheduler,
    runner: ModelRunner,
    metrics: PDMetrics,
) -> PrefixSharing | None:
    """The sharing that the flags ask for; None where they do not, or where this decoder cannot."""
    if not (config.saves_kv or config.looks_for_kv):
        return None
    if reason := _unshared(config, decoder):
        logger.warning("prefixes are not shared: %s", reason)
        return None
    url = config.kv_store or config.store
    try:
        parse_store(url)
    except ConfigError as error:
        raise ConfigError(f"{'--kv-store' if config.kv_store else '--store'}: {error}") from error
    kv, geometry = scheduler.kv, decoder.geometry
    copier = KVCopier(runner.kv_cache, runner.states)
    form = StoredKV(
        model_key,
        block_size=kv.block_size,
        width=copier.rows.width,
        dtype=str(decoder.dtype).removeprefix("torch."),
        shapes=copier.rows.shapes,
        state_bytes=geometry.slot_bytes,
    )
    if form.block_bytes * form.group_blocks > config.share_memory // 2:
        logger.warning(
            "prefixes are not shared: half of --share-memory %s holds no group of %d blocks, %s",
            format_size(config.share_memory),
            form.group_blocks,
            format_size(form.block_bytes * form.group_blocks),
        )
        return None
    share = 1.0 if config.kv_store else config.kv_store_share
    transfers = KVTransfers(url, config.share_memory, share)
    rule = CostRule(form.block_bytes // kv.block_size, asked=config.share_prefixes == "auto")
    parts = form, kv, copier, transfers, rule, metrics
    saves = BlockSaves(*parts) if config.saves_kv else None
    loads = None
    if config.looks_for_kv:
        stored = (lambda digest: None) if saves is None else saves.note
        loads = BlockLoads(*parts, spare=lambda: scheduler.num_running, stored=stored)
    logger.info(
        "prefixes are shared (%s): groups of %d blocks, %s, in %s",
        " and ".join(word for word, part in (("saved", saves), ("looked for", loads)) if part is not None),
        form.group_blocks,
        format_size(form.block_bytes * form.group_blocks),
        "--kv-store" if config.kv_store else f"{config.kv_store_share:.0%} of the store",
    )
    return PrefixSharing(saves, loads, transfers, rule)


def _unshared(config: PDConfig, decoder: DecoderSide) -> str:
    """Why this decoder's KV is not shared; empty where it is."""
    if decoder.cross is not None:
        return "an encoder-decoder model's prompt is short, and its cross table is made of its item again"
    if config.tensor_parallel > 1:
        return "each rank of --tensor-parallel has a part of every block"
    if not (config.kv_store or config.store):
        return "there is no store: give --store or --kv-store"
    if not config.prefix_caching:
        return "blocks are found by prefix: leave out --no-prefix-caching"
    return ""
