"""The start of an encoder worker's ranks, which load their towers at the same time."""

from __future__ import annotations

import logging

from triptych.base.config import EncoderConfig
from triptych.base.ranks.devices import check_ranks
from triptych.base.ranks.errors import RankStartError
from triptych.base.ranks.group import RankGroup
from triptych.encoder_worker.loading import activation_bytes, load
from triptych.encoder_worker.ranks.tower import DataParallelTower
from triptych.models.base import EncoderSide
from triptych.models.defaults import resolve_device
from triptych.models.identity import ModelIdentity

logger = logging.getLogger(__name__)

OPTION = "--encoder-data-parallel"


def load_ranks(config: EncoderConfig) -> tuple[EncoderSide, ModelIdentity]:
    """The tower, with its other ranks if it has any, and its model's identity.

    ConfigError for what cannot work as configured, RankStartError for a rank that does not start.
    """
    size = config.encoder_data_parallel
    check_ranks(OPTION, size, resolve_device(config.device))
    if size == 1:
        return _loaded(config)
    group = RankGroup("encoder", size, config)
    group.start()
    try:
        encoder, model = _loaded(config)
        for rank, ready in enumerate(group.wait_ready(), 1):
            if ready != {"width": encoder.width, "dtype": str(encoder.dtype)}:
                raise RankStartError(f"rank {rank} has another tower than rank 0: {ready}")
    except BaseException:
        group.close(seconds=0)
        raise
    logger.info("%d ranks share each batch; processes %s", size, group.pids)
    return DataParallelTower(encoder, group, config.batch_patches), model


def _loaded(config: EncoderConfig) -> tuple[EncoderSide, ModelIdentity]:
    encoder, model = load(config)
    activation_bytes(config, encoder)
    return encoder, model
