"""The connectors of an encoder and of a PD worker, between which embeddings go without the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from support.engine.transfers import wait_for
from triptych.base.config.tls import TlsFiles
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer, ECConnectorOutput, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.output_server import OutputServer
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata

NOWHERE = "unix:///nobody/there.sock"


LIMIT = 4 << 20


def entry(plan: ItemPlan, seed: int = 0) -> EncoderOutput:
    values = torch.arange(plan.rows * plan.width, dtype=torch.float32).reshape(plan.rows, plan.width)
    return EncoderOutput(plan, values / 7 + seed)


class Pair:
    """An encoder's connector, and a PD worker's."""

    def __init__(self, store_url: str, token: str = "", tls: TlsFiles | None = None, memory: int = LIMIT):
        serving = DirectTransfer(memory=memory, host="127.0.0.1", token=token, tls=tls)
        self.serving = serving
        self.reading = DirectTransfer(token=token, tls=tls)
        config = ECTransferConfig(store_url=store_url, save_timeout=2.0, load_timeout=10.0)
        self.encoder = RedisConnectorWorker(replace(config, ec_role="producer", direct=serving))
        self.pd = RedisConnectorWorker(replace(config, ec_role="consumer", direct=self.reading))
        self.generation = 0

    @property
    def server(self) -> OutputServer:
        assert self.encoder._server is not None
        return self.encoder._server

    def offer(self, item: EncoderOutput) -> EmbeddingSource:
        key = item.plan.mm_hash
        self.encoder.save_caches({key: item}, key)
        return wait_for(self.encoder, lambda out: out.offered).offered[key]

    def fetch(self, plan: ItemPlan, source: EmbeddingSource | None) -> ECConnectorOutput:
        self.generation += 1
        orders = TransferMetadata(1, fetches=(Fetch(plan, self.generation, source),))
        self.pd.start_load_caches(TransferMetadata.from_bytes(orders.to_bytes()), {})
        return wait_for(self.pd, lambda out: out.fetched or out.failed)

    def move(self, plan: ItemPlan) -> torch.Tensor:
        cache: dict[str, EncoderOutput] = {}
        self.pd.start_load_caches(TransferMetadata(2, moves=(LoadId(plan.mm_hash, self.generation),)), cache)
        wait_for(self.pd, lambda out: out.loaded)
        return cache[plan.mm_hash].data

    def close(self) -> None:
        self.pd.shutdown()
        self.encoder.shutdown()


@contextmanager
def opened(store_url: str, **options: object) -> Iterator[Pair]:
    pair = Pair(store_url, **options)  # type: ignore[arg-type]
    try:
        yield pair
    finally:
        pair.close()
