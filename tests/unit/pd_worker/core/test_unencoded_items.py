"""Items that nobody encodes since this worker is expected to hold them: used, or missed at once."""

from __future__ import annotations

import random
from dataclasses import replace

from support.engine.engine_events import kind
from support.engine.engine_requests import (
    STORE,
    Make,
    ModellessEngine,
    finished,
    make_cross,
    make_feature,
    make_request,
    publish,
)
from support.engine.tight_engine import ROW_BYTES, TightEngine, serve, tight_requests
from triptych.base.delta import Delta
from triptych.base.types import FinishReason, MMFeature
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.pd_worker.core.request import EngineRequest


def again(
    name: str, prompt: int, *features: MMFeature, root: bytes = b"r" * 32, max_tokens: int = 1
) -> EngineRequest:
    """A later request whose items nobody encodes."""
    request = make_request(name, prompt, features, ready=[], arrival=1.0, root=root, max_tokens=max_tokens)
    return replace(request, unencoded=frozenset(feature.mm_hash for feature in features))


def asked_before(engine: ModellessEngine, prompt: int, *features: MMFeature) -> None:
    """The items' first request has ended, and the store and the encoder cache have lost their embeddings."""
    publish(STORE, *features)
    engine.add(make_request("first", prompt, features))
    engine.run_out()
    STORE.clear()
    engine.events.clear()
    for key in {feature.mm_hash for feature in features}:
        engine.cache._evict(key)


def missing(engine: ModellessEngine) -> list[tuple[str, str]]:
    return [(e.request_id, e.item_missing.mm_hash) for e in engine.of("item_missing")]


def answered(engine: ModellessEngine, *names: str) -> bool:
    return all(finished(engine)[name].reason is FinishReason.LENGTH for name in names)


def test_an_item_is_missed_once_though_its_request_is_looked_at_again(make: Make) -> None:
    engine, image = make(), make_feature("cat", 6, 6)
    engine.add(again("a", 16, image))
    engine.step()
    engine.add(make_request("b", 6))  # caches the first block of the other one's prompt
    for _ in range(3):
        engine.step()
    assert missing(engine) == [("a", image.mm_hash)]


def test_an_item_whose_span_is_cached_is_neither_loaded_nor_missed(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    asked_before(engine, 12, image)
    engine.add(again("second", 20, image))
    engine.run_out()
    assert missing(engine) == []
    assert [event.request_id for event in engine.of("item_loaded")] == ["second"]
    assert finished(engine)["second"].cached_tokens == 12


def test_an_item_that_is_not_cached_is_missed_with_the_admission_and_used_once_it_is_there(make):
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(again("a", 12, image))
    engine.step()
    assert [kind(event) for event in engine.events] == ["admitted", "item_missing"]
    for _ in range(3):
        engine.step()
    assert missing(engine) == [("a", image.mm_hash)]
    engine.arrive(image)
    engine.run_out()
    assert answered(engine, "a")


def test_a_picture_that_stands_twice_in_the_prefix_is_not(make: Make) -> None:
    engine, both = make(budget=64), (make_feature("cat", 2, 6), make_feature("cat", 8, 6))
    asked_before(engine, 20, *both)
    engine.add(again("b", 24, *both))
    engine.run_out()
    assert missing(engine) == []
    assert answered(engine, "b")


def test_another_salts_prefix_does_not_count(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    asked_before(engine, 12, image)
    engine.add(again("b", 20, image, root=b"s" * 32))
    engine.step()
    assert missing(engine) == [("b", image.mm_hash)]


def test_an_embedding_in_the_encoder_cache_is_used(make: Make) -> None:
    engine, image = make(prefix_caching=False), make_feature("cat", 2, 6)
    publish(STORE, image)
    engine.add(make_request("first", 12, [image]))
    engine.run_out()
    STORE.clear()
    engine.add(again("b", 20, image))
    engine.run_out()
    assert missing(engine) == []
    assert answered(engine, "b")


def test_a_prefix_that_is_evicted_while_its_request_waits_is_missed_then(make: Make) -> None:
    engine, image = make(num_blocks=8, max_num_seqs=1), make_feature("cat", 2, 6)
    asked_before(engine, 12, image)
    engine.add(make_request("long", [9] * 4, max_tokens=28))
    engine.step()
    engine.add(again("b", 20, image))
    engine.step()
    assert missing(engine) == []  # it waits for the one slot, and its prefix is there still
    while not missing(engine):
        engine.step()
    assert "long" not in finished(engine)
    engine.arrive(image)
    engine.run_out()
    assert answered(engine, "long", "b")


def test_a_preempted_request_whose_prefix_is_evicted_misses_its_item(make: Make) -> None:
    engine, image = make(num_blocks=8), make_feature("cat", 2, 6)
    asked_before(engine, 9, image)
    engine.add(make_request("long", [9] * 4, max_tokens=28, arrival=0.5))
    engine.add(again("b", 9, image, max_tokens=12))
    while not missing(engine):
        engine.step()
        assert engine.scheduler.num_running
    assert [event.request_id for event in engine.of("item_loaded")] == ["b"]  # it had the item before
    engine.arrive(image)
    engine.run_out()
    assert answered(engine, "long", "b")


def test_a_request_misses_its_item_though_another_one_waits_for_it_already(make: Make) -> None:
    """The other one may be cancelled, and its encoder job with it."""
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(make_request("a", 12, [image]))  # ready, and gone from the store
    while not missing(engine):
        engine.step()
    engine.add(again("b", 12, image))
    engine.step()
    assert missing(engine) == [("a", image.mm_hash), ("b", image.mm_hash)]


def test_a_ready_mark_of_another_proxy_makes_it_an_item_like_any_other(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.arrive(image)
    engine.add(again("b", 12, image))
    engine.run_out()
    assert missing(engine) == []
    assert answered(engine, "b")


def test_a_cross_table_stands_for_its_item_and_its_absence_is_missed(make: Make) -> None:
    engine, sound = make(cross=True, num_blocks=8), make_cross("hum", 8)
    publish(STORE, sound)
    engine.add(make_request("first", 4, [sound]))
    engine.run_out()
    STORE.clear()
    engine.cache._evict(sound.mm_hash)
    engine.add(again("second", 6, sound))
    engine.run_out()
    assert missing(engine) == []
    assert answered(engine, "second")
    engine.add(again("third", 6, make_cross("song", 8)))
    engine.step()
    assert [name for name, _ in missing(engine)] == ["third"]


class AskedEngine(TightEngine):
    """Encodes for an admitted request what was not expected here, and whatever is missed."""

    def encode_what_was_asked_for(self) -> None:
        wanted = []
        for event in self.events[self._seen :]:
            if isinstance(event, Delta):
                continue
            if event.HasField("item_missing"):
                wanted.append(self.known[event.item_missing.mm_hash])
            elif event.HasField("admitted"):
                state = self.scheduler._requests.get((event.proxy_id, event.request_id))
                features = () if state is None else state.features
                unencoded = frozenset() if state is None else state.request.unencoded
                wanted += [feature.plan for feature in features if feature.mm_hash not in unencoded]
        self._seen = len(self.events)
        self.encode(*wanted)


def test_an_item_whose_cross_table_goes_before_the_start_is_missed_and_then_loaded_again(make: Make) -> None:
    engine, text = make(cross=True, max_num_seqs=1, num_blocks=8), make_cross("text", 9)
    asked_before(engine, 2, text)
    other = make_cross("other", 3)
    publish(STORE, other)
    engine.add(make_request("b", 8, [other], max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.events.clear()
    engine.add(again("a", 2, text))
    engine.step()
    assert [event.item_loaded.mm_hash for event in engine.of("item_loaded")] == [text.mm_hash] and missing(
        engine
    ) == []
    for _ in range(40):
        engine.step()
        if missing(engine):
            break
    engine.events = [event for event in engine.events if kind(event) != "item_loaded"]
    engine.arrive(text)
    engine.run_out()
    assert [event.item_loaded.mm_hash for event in engine.of("item_loaded")] == [text.mm_hash]
    assert answered(engine, "a", "b")


def later_turns(rng: random.Random, first: list[EngineRequest]) -> list[EngineRequest]:
    """Longer prompts of the same requests, with items that nobody encodes."""
    turns = []
    for number, request in enumerate(rng.choices(first, k=8), start=len(first)):
        prompt = [*request.prompt_token_ids, *[rng.randint(0, 1)] * rng.randint(0, 6)]
        turn = make_request(
            f"r{number}", prompt, request.features, max_tokens=rng.randint(1, 6), arrival=number, ready=()
        )
        turns.append(replace(turn, unencoded=frozenset(feature.mm_hash for feature in turn.features)))
    return turns


def test_turns_whose_items_nobody_encodes_all_end_in_a_memory_full_to_the_last_byte() -> None:
    """Under losses, cancels, evictions of blocks and a slow encoder; some items are held, others missed."""
    held, missed = 0, 0
    for seed in range(12):
        rng, rows = random.Random(seed), 6 + seed % 9
        engine = AskedEngine(
            MemoryStore(),
            capacity=rows * ROW_BYTES,
            num_blocks=rng.randint(10, 20),
            max_model_len=46,
            budget=rng.choice([3, 8, 16]),
            max_num_seqs=rng.randint(1, 5),
            prefix_caching=rng.random() < 0.8,
        )
        first = tight_requests(rng, rows, 8)
        turns = later_turns(rng, first)
        assert serve(engine, rng, [*first, *turns], limit=600), f"seed {seed}: requests wait for ever"
        assert len(finished(engine)) == 16
        names = {turn.request_id for turn in turns if turn.features}
        missed += len({event.request_id for event in engine.of("item_missing")} & names)
        held += len(names - {event.request_id for event in engine.of("item_missing")})
        engine.assert_at_rest()
        engine.close()
    assert held > 5 and missed > 5, (held, missed)
