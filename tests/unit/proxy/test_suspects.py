"""What a record of lost workers says of a request or an item."""

from __future__ import annotations

from triptych.proxy.suspects import LossRecord


def test_two_losses_in_company_make_a_suspect_and_a_third_does_not_convict_it() -> None:
    record = LossRecord()
    assert not record.suspect
    for number in range(3):
        assert not record.add(f"w{number}", alone=False)
        assert record.suspect is (number >= 1)
    assert record.addresses == {"w1", "w2"}
    assert record.add("w3", alone=True)
    assert len(record) == 3


def test_only_a_connections_loss_is_withdrawn_when_its_process_returns() -> None:
    record = LossRecord()
    record.add("w1", "i1", alone=False, final=False)
    record.add("w2", "i2", alone=False)
    record.withdraw("i2")
    assert record.suspect
    record.withdraw("i1")
    assert not record.suspect and record.addresses == {"w2"}
