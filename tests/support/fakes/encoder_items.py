"""An encoder scheduler whose items have names."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.encoder_worker.scheduler import EncoderItem, EncoderScheduler, SchedulerCounts


@dataclass(eq=False, slots=True)
class Keyed(EncoderItem):
    key: str = ""
    dropped: bool = False

    def drop_pixels(self) -> None:
        EncoderItem.drop_pixels(self)
        self.dropped = True


class Keys:
    """A scheduler whose items have names, and which notes whose pixels were dropped."""

    def __init__(self, memory: int, patches: int, preparations: int, credit: int) -> None:
        self.scheduler = EncoderScheduler[Keyed](
            prepared_memory=memory, batch_patches=patches, preparations=preparations, tower_credit=credit
        )
        self.items: dict[str, Keyed] = {}

    def add(self, key: str, *, re_encode: bool = False, looked_up: bool = True) -> None:
        self.items[key] = Keyed(key=key, re_encode=re_encode, looked_up=looked_up)
        self.scheduler.add(self.items[key])

    def remove(self, key: str) -> None:
        self.scheduler.remove(self.items.pop(key))

    def needs_media(self, key: str) -> bool:
        return self.scheduler.needs_media(self.items[key])

    def media_arrived(self, key: str) -> None:
        self.scheduler.media_arrived(self.items[key])

    def media_lost(self, key: str) -> None:
        self.scheduler.media_lost(self.items[key])

    def permit(self, key: str) -> None:
        self.scheduler.permit(self.items[key])

    def withdraw(self, key: str) -> None:
        self.scheduler.withdraw(self.items[key])

    def prepared(self, key: str, *, nbytes: int, cost: int) -> None:
        self.scheduler.prepared(self.items[key], nbytes=nbytes, cost=cost)

    def next_preparation(self) -> str | None:
        return _key(self.scheduler.next_preparation())

    def next_media_request(self) -> str | None:
        return _key(self.scheduler.next_media_request())

    def next_batch(self) -> list[str]:
        return [item.key for item in self.scheduler.next_batch()]

    def waiting(self) -> list[str]:
        return [item.key for item in self.scheduler.waiting()]

    def pop_dropped(self) -> list[str]:
        dropped = [item for item in self.items.values() if item.dropped]
        for item in dropped:
            item.dropped = False
        return [item.key for item in sorted(dropped, key=lambda i: i.prepared_at or 0)]

    @property
    def counts(self) -> SchedulerCounts:
        return self.scheduler.counts()


def _key(item: Keyed | None) -> str | None:
    return None if item is None else item.key


def scheduler(memory: int = 100, patches: int = 10, preparations: int = 4, credit: int = 100) -> Keys:
    return Keys(memory, patches, preparations, credit)


def plan(s: Keys, key: str, *, nbytes: int = 10, cost: int = 1, re_encode: bool = False) -> None:
    s.add(key, re_encode=re_encode)
    s.media_arrived(key)
    assert s.next_preparation() == key
    s.prepared(key, nbytes=nbytes, cost=cost)


def run(s: Keys, *keys: str) -> None:
    for key in keys:
        s.permit(key)
