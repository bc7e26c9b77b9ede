"""Each role under its own user on a Redis Cluster, one of whose slots is being moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data.items import make_plan
from support.stores.redis_cluster import redis_cluster
from support.stores.roles import USES, small_parts
from support.stores.users import role_password, role_url
from triptych.apps.access import grants_of, password_hash, rules, user_name
from triptych.store import keys
from triptych.store.topology.cluster import slot_of

__all__ = ["small_parts"]


@pytest.mark.usefixtures("small_parts")
async def test_every_role_may_follow_its_items_to_another_node(tmp_path: Path) -> None:
    slot = slot_of(keys.embedding(make_plan("whole").mm_hash))
    with redis_cluster(tmp_path) as servers:
        each = -(-16384 // 3)
        source, target = servers.primaries[slot // each], servers.primaries[slot // each - 1]
        for node in servers.nodes:
            for role in USES:
                password = f"#{password_hash(role_password(role))}"
                node.call("ACL", "SETUSER", user_name(role), "on", password, *rules(grants_of(role)))
        servers.begin_move(slot, source, target)
        for role, use in USES.items():
            await use(role_url(servers.url, role).removesuffix("/0"))
        assert target.call("DBSIZE")
        refused = [entry for node in servers.nodes for entry in node.call("ACL", "LOG")]
        assert not refused
        for command in ("cluster|slots", "asking"):
            assert any(f"cmdstat_{command}" in node.call("INFO", "commandstats") for node in servers.nodes)
