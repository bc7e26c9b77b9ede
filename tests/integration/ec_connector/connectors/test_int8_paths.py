"""Rows in 8 bits by the paths without the store."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.data.items import make_plan
from support.engine.direct_pair import NOWHERE, opened
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.int8_rows import packed


@pytest.mark.parametrize("path", ["shm", "peer"])
@pytest.mark.parametrize("rows", [7, 3000])
def test_they_come_as_they_were_and_what_is_not_finite_is_not_served(path: str, rows: int) -> None:
    plan = replace(make_plan("int8", rows=rows, width=1024, dtype="int8"), scales=4)
    values = torch.randn(rows, 1024)
    item = EncoderOutput(plan, packed(values, 4))
    with opened(NOWHERE) as pair:
        assert pair.encoder.serve(item) is True
        source = pair.offer(item)
        out = pair.fetch(plan, source if path == "shm" else replace(source, socket=""))
        assert out.paths == {plan.mm_hash: path}
        assert torch.equal(pair.move(plan), item.data)
        values[rows - 1, 1023] = float("nan")
        other = replace(plan, mm_hash="f" * 64)
        assert pair.encoder.serve(EncoderOutput(other, packed(values, 4))) is False
