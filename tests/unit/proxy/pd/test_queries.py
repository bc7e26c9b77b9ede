"""Questions of clients to PD workers: which workers are asked, and what becomes of one that has gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.base.errors import Unavailable
from triptych.proxy.pd.queries import PDQueries


async def test_workers_that_have_gone_while_others_were_asked_are_unavailable() -> None:
    asked: list[str] = []

    def channel(role: str, address: str) -> Any:
        asked.append(address)
        raise KeyError((role, address))

    infos = [SimpleNamespace(address=address, model_key="k") for address in ("a:1", "b:1", "c:1")]
    pool: Any = SimpleNamespace(
        serving=lambda role: [SimpleNamespace(info=info) for info in infos],
        model_key=lambda model: "k",
        channel=channel,
    )
    with pytest.raises(Unavailable):
        await PDQueries(pool).detokenize("m", [1])
    assert len(set(asked)) == 2
