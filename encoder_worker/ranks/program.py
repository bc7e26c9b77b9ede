"""The program of an encoder worker's ranks 1, 2, …: loads the tower, then encodes shares of batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from triptych.base.config import EncoderConfig
from triptych.base.config.flags import config_from
from triptych.base.cpu.threads import threads_of_rank, tower_threads, use_threads
from triptych.base.machine.device import Device
from triptych.base.machine.device_fault import check_device
from triptych.base.ranks.channel import Message
from triptych.base.ranks.process_group import device_of
from triptych.base.ranks.rank import Handler, Rank
from triptych.encoder_worker.host_copier import HostCopier
from triptych.encoder_worker.loading import activation_bytes, load_tower
from triptych.encoder_worker.ranks.shared_items import shared
from triptych.encoder_worker.ranks.tower import ShareEncoder
from triptych.models.defaults import resolve_device
from triptych.models.preload import preload, quick_imports
from triptych.models.registry import before_each_layer


def main(rank: Rank) -> None:
    """Runs until rank 0 ends. ConfigError for what cannot work as configured."""
    config = config_from(EncoderConfig, rank.config)
    use_threads(threads_of_rank(tower_threads(config.threads, config.cpus), rank.size))
    with quick_imports():
        preload(Path(config.model))
    device = device_of(resolve_device(config.device), rank.rank)
    config = replace(config, device=str(device))
    encoder = load_tower(config)
    activation_bytes(config, encoder)
    before_each_layer(encoder.module, rank.tick)
    tower = ShareEncoder(encoder, config.batch_patches)
    rank.serve(handler(tower, encoder.device), {"width": encoder.width, "dtype": str(encoder.dtype)})


def handler(tower: ShareEncoder, device: torch.device) -> Handler:
    """What does the commands of rank 0: one is one share, which it encodes in place."""
    to_host = HostCopier(device)

    def encode(command: Message, descriptors: list[int]) -> Message:
        (descriptor,) = descriptors
        share = shared(descriptor, command)
        try:
            with torch.inference_mode():
                to_host(tower.encode(share.items), share.rows)
        except Exception as error:
            check_device(error, device)
            Device.of(device).empty_cache()
            raise
        return {}

    return encode
