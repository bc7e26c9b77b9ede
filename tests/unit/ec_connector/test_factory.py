from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from support.data.items import make_plan
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig
from triptych.ec_connector.connectors.memory import MemoryConnectorScheduler, MemoryConnectorWorker
from triptych.ec_connector.connectors.memory_store import MemoryStore
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata


def test_roles_have_the_numbers_that_peers_use() -> None:
    assert (ECConnectorRole.SCHEDULER, ECConnectorRole.WORKER) == (0, 1)


def test_a_registered_name_makes_both_roles() -> None:
    config = ECTransferConfig(connector="memory", store=MemoryStore())
    scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
    assert isinstance(scheduler, MemoryConnectorScheduler)
    assert isinstance(worker, MemoryConnectorWorker)
    assert (scheduler.role, worker.role) == (ECConnectorRole.SCHEDULER, ECConnectorRole.WORKER)
    assert scheduler.config is worker.config is config
    assert scheduler.metadata is worker.metadata is None


def test_a_module_path_makes_a_connector_too() -> None:
    config = ECTransferConfig(connector="triptych.ec_connector.connectors.memory:MemoryConnector")
    made = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    assert isinstance(made, MemoryConnectorScheduler)


@pytest.mark.parametrize("name", ["nixl", "no.such.module:Thing", "triptych.base.types:Nothing"])
def test_an_unknown_connector_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="connector"):
        ECConnectorFactory.create_connector(ECTransferConfig(connector=name), ECConnectorRole.WORKER)


def test_the_memory_connector_has_no_store_of_its_own() -> None:
    with pytest.raises(ValueError, match="needs a store"):
        ECConnectorFactory.create_connector(ECTransferConfig(connector="memory"), ECConnectorRole.WORKER)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already"):
        ECConnectorFactory.register("redis", "somewhere.else:Thing")


def test_importing_factory_and_store_imports_no_torch() -> None:
    code = (
        "import sys, triptych.ec_connector.factory, triptych.registry.heartbeat, "
        "triptych.registry.leases, triptych.ec_connector.connectors.scheduler_role; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_metadata_survives_msgpack() -> None:
    plan = dataclasses.replace(make_plan(), runs=((0, 3), (4, 4)), length=8)
    metadata = TransferMetadata(
        step=7,
        fetches=(Fetch(plan, 3), Fetch(make_plan("other"), 4)),
        moves=(LoadId(plan.mm_hash, 2),),
        drops=(LoadId(plan.mm_hash, 1),),
    )
    assert TransferMetadata.from_bytes(metadata.to_bytes()) == metadata


def test_two_metadata_share_no_state() -> None:
    one, two = TransferMetadata(1), TransferMetadata(2)
    assert one.fetches == two.fetches == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.step = 3  # type: ignore[misc]


def test_metadata_of_another_layout_is_refused() -> None:
    with pytest.raises(ValueError):
        TransferMetadata.from_bytes(b"\x95\x09\x01\x90\x90\x90")
