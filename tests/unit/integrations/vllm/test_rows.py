"""Rows as tensors, from host copies and into bytes."""

from __future__ import annotations

import pytest
import torch

from triptych.base.types import ItemPlan
from triptych.integrations.vllm.host_copies import CopyFolder, HostCopies, HostCopy
from triptych.integrations.vllm.requests import SaveOrder
from triptych.integrations.vllm.rows import CopySource, host_body, plan_to_save, read_rows, source_of

CPU = torch.device("cpu")
KEY, NAMESPACE = "a" * 64, "b" * 64


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_arrive_as_they_were_and_outlive_their_copy(tmp_path, in_a_file, dtype):
    rows = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(dtype)
    plan = ItemPlan(KEY, NAMESPACE, "image", 3, 4, str(dtype).removeprefix("torch."), 3)
    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)) if in_a_file else None)
    copy = copies.allocate(plan)
    assert isinstance(copy, HostCopy)
    copy.memory[:] = host_body(rows)()
    source = source_of(copy)
    assert (source.memory is None) is in_a_file
    read = read_rows(source, CPU, dtype)
    copy.memory[:] = bytes(plan.nbytes)
    assert torch.equal(read, rows)


def test_rows_take_the_models_dtype():
    memory = memoryview(bytearray(torch.tensor([[1.5, -2.0]]).numpy().tobytes()))
    read = read_rows(CopySource(KEY, 1, 2, "float32", memory=memory), CPU, torch.bfloat16)
    assert read.dtype == torch.bfloat16
    assert read.tolist() == [[1.5, -2.0]]


def test_the_bytes_to_save_are_a_copy_of_the_rows_alone():
    batch = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    body = host_body(batch[2:4])()
    batch.zero_()
    assert torch.frombuffer(body, dtype=torch.float32).tolist() == list(range(8, 16))


def test_the_plan_to_save_is_that_of_the_rows():
    order = SaveOrder(KEY, "image", 5, ((0, 2), (3, 1)), (1, 2, 6))
    plan = plan_to_save(order, NAMESPACE, torch.zeros(3, 4, dtype=torch.bfloat16))
    assert plan == ItemPlan(KEY, NAMESPACE, "image", 3, 4, "bfloat16", 5, ((0, 2), (3, 1)), (1, 2, 6))
