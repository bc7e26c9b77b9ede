from __future__ import annotations

from triptych.simulator.cluster.fifo_lock import FifoLock


def test_a_lock_is_granted_in_order_and_its_holder_is_called_when_another_user_waits() -> None:
    seen: list[str] = []
    lock = FifoLock()
    lock.acquire(lambda: seen.append("a"))
    lock.on_waiter(lambda: seen.append("wanted"))
    lock.acquire(lambda: seen.append("b"))
    lock.acquire(lambda: seen.append("c"))
    assert seen == ["a", "wanted", "wanted"] and lock.contended
    lock.release()
    lock.release()
    lock.release()
    assert seen == ["a", "wanted", "wanted", "b", "c"] and not lock.contended
