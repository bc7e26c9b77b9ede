"""A producer never loads, a consumer never saves; who asks for it all the same is told."""

from __future__ import annotations

import pytest
import torch

from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig, EncoderOutput, Presence
from triptych.ec_connector.connectors.memory_store import MemoryStore
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.ec_connector.metadata import Fetch, TransferMetadata

PLAN = ItemPlan("a" * 64, "n" * 64, "image", 2, 4, "float32", 2)
FEATURE = MMFeature(PLAN, Placement(0, 2))


class Request:
    request_id = "r"
    features = (FEATURE,)


@pytest.fixture(params=["memory", "redis"])
def config(request, tmp_path):
    """A transfer config; its store does not answer, for nobody should ask it."""
    url, store = f"unix://{tmp_path}/no.sock", MemoryStore()

    def make(ec_role):
        return ECTransferConfig(connector=request.param, store_url=url, store=store, ec_role=ec_role)

    return make


def entry():
    return {PLAN.mm_hash: EncoderOutput(PLAN, torch.ones(2, 4))}


@pytest.mark.parametrize(("ec_role", "loads"), [("both", True), ("consumer", True), ("producer", False)])
def test_the_scheduler_of_a_producer_orders_no_load(config, ec_role, loads):
    scheduler = ECConnectorFactory.create_connector(config(ec_role), ECConnectorRole.SCHEDULER)
    scheduler.add_request(Request())
    scheduler.item_ready(PLAN.mm_hash)
    assert scheduler.has_caches(Request()) == [Presence.LOADING if loads else Presence.UNKNOWN]
    scheduler.update_state_after_alloc(Request(), 0)
    metadata = scheduler.build_connector_meta(None)
    assert (len(metadata.fetches), metadata.moves) == (int(loads), ())


def test_a_load_by_a_producer_fails_with_the_reason(config):
    worker = ECConnectorFactory.create_connector(config("producer"), ECConnectorRole.WORKER)
    cache = {}
    worker.config.store.update(entry())
    worker.start_load_caches(TransferMetadata(1, (Fetch(PLAN, 1),), (), ()), cache)
    (failure,) = worker.get_finished().failed
    assert failure.mm_hash == PLAN.mm_hash
    assert "producer" in failure.reason
    assert cache == {}
    worker.shutdown()


def test_a_save_by_a_consumer_is_reported_as_unsaved_with_the_reason(config):
    worker = ECConnectorFactory.create_connector(config("consumer"), ECConnectorRole.WORKER)
    worker.save_caches(entry(), PLAN.mm_hash)
    output = worker.get_finished()
    assert output.saved == []
    assert "consumer" in output.unsaved[PLAN.mm_hash]
    assert worker.config.store == {}
    worker.shutdown()


def test_another_role_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="ec_role 'reader': use one of both, producer, consumer"):
        ECTransferConfig(ec_role="reader")
