"""Replays of decode graphs against the same steps without graphs, over real decoders.

The backend replays the operators of one recorded run, as a CUDA graph does: what was decided at the capture
stays decided.
"""

from __future__ import annotations

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.engine.decode_steps import BLOCK, NAN, DecodeSteps, Decoding
from support.graphs import RecordingBackend
from support.matrix import matrix
from triptych.base.machine.graphs import EagerStatic
from triptych.models.base import DecoderSide, MergedEmbeds
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.attention.metadata import AttentionMetadata, PrefillSpan
from triptych.pd_worker.runner.batch import Batch
from triptych.pd_worker.runner.decode_graphs import DecodeBuffers, DecodeGraphs, DecodeSize
from triptych.pd_worker.runner.model_runner import non_finite_chunks

CPU = torch.device("cpu")
#: Every attention of the product: three-row positions, one-row positions, a bias beside cross-attention.
FAMILIES = ("qwen3_vl", "t5", "llava")
SHORT = [Decoding(1, 3)]
MIXED = [Decoding(5, 40), Decoding(77, 1), Decoding(16, 64), Decoding(1, 17), Decoding(130, 9)]
LONG = [Decoding(300, 64), Decoding(8, 2)]

#: The second one is shorter by a sequence, in a graph of the same size.
STEPS = (MIXED[:4], MIXED[:3], MIXED, LONG)


def decoder_of(family: str, dtype: torch.dtype = torch.float32) -> DecoderSide:
    return load_decoder(build_checkpoint(family), device=CPU, dtype=dtype, attn_implementation=ATTENTION_NAME)


@pytest.fixture(scope="module", params=matrix(FAMILIES, quick=2))
def steps(request: pytest.FixtureRequest) -> DecodeSteps:
    return DecodeSteps(decoder_of(request.param), RecordingBackend())


@pytest.fixture(scope="module")
def llava() -> DecodeSteps:
    return DecodeSteps(decoder_of("llava"), RecordingBackend())


def near(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def is_right(steps: DecodeSteps, batch: Batch) -> bool:
    """The replay gives what the step gives without a graph, and neither reads nor writes others' blocks."""
    expected = steps.eager(batch)
    with steps.unchanged():
        steps.poison_others(batch)
        return near(steps.replayed(batch), expected) and steps.others_are_poison(batch)


@pytest.mark.parametrize("sequences", [SHORT, MIXED, LONG, MIXED[:3]], ids=["short", "mixed", "long", "odd"])
def test_a_replay_gives_what_the_step_gives_without_a_graph(steps, sequences):
    batch = steps.batch(sequences)
    expected = steps.eager(batch)
    assert near(steps.replayed(batch), expected)


def test_steps_that_shrink_grow_and_lengthen_between_replays_change_nothing(steps: DecodeSteps) -> None:
    """Sequences end in mid-batch, come back from preemption in other blocks, and outgrow a width."""
    for seed, sequences in enumerate((MIXED, MIXED[:1], LONG, MIXED[2:], [*MIXED, *LONG], SHORT, MIXED)):
        batch = steps.batch(sequences, seed)
        expected = steps.eager(batch)
        assert near(steps.replayed(batch), expected), seed


def test_the_same_step_before_and_after_another_one_is_bit_for_bit_alike(steps: DecodeSteps) -> None:
    first, other = steps.batch(MIXED, 1), steps.batch([Decoding(90, 30)] * 5, 2)
    with steps.unchanged():
        before = steps.replayed(first)
    with steps.unchanged():
        between = steps.replayed(other)
    with steps.unchanged():
        assert torch.equal(steps.replayed(first), before)
    assert not near(before, between)


def test_nothing_of_other_requests_and_of_earlier_replays_is_read(steps: DecodeSteps) -> None:
    for seed, sequences in enumerate(STEPS):
        steps.poison_buffers()
        assert is_right(steps, steps.batch(sequences, seed))


def test_a_replay_writes_to_the_slots_of_its_step_and_to_the_spare_block_alone(steps: DecodeSteps) -> None:
    batch = steps.batch(MIXED[:3], 3)
    before = [tensor.clone() for tensor in steps.tensors]
    steps.replayed(batch)
    written = {*batch.attention.slots.tolist(), steps.num_blocks * BLOCK}
    for tensor, old in zip(steps.tensors, before, strict=True):
        changed = (tensor != old).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert set(changed) <= written and set(batch.attention.slots.tolist()) <= set(changed)


def test_keys_and_values_of_a_replay_are_those_of_the_step_without_a_graph(steps: DecodeSteps) -> None:
    batch = steps.batch(MIXED, 4)
    slots = batch.attention.slots
    with steps.unchanged():
        steps.replayed(batch)
        ours = [tensor.flatten(0, 1)[slots] for tensor in steps.tensors]
    with steps.unchanged(), torch.inference_mode():
        embeds = steps.decoder.embed(batch.token_ids)
        steps.decoder.forward(embeds, batch.positions, None, batch.attention)
        theirs = [tensor.flatten(0, 1)[slots] for tensor in steps.tensors]
    assert all(near(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_result_outlives_the_next_replay(llava: DecodeSteps) -> None:
    first = llava.replayed(llava.batch(MIXED, 1))
    kept = first.clone()
    llava.replayed(llava.batch(LONG * 2, 2))
    assert torch.equal(first, kept)


@pytest.mark.parametrize("place", ["hidden", "key"])
def test_values_that_are_no_numbers_are_found_in_their_own_rows(place: str) -> None:
    steps = DecodeSteps(decoder_of("llava", torch.float16), EagerStatic())
    batch = steps.batch(MIXED, 6)
    bad = batch.attention.decode_tables[2, 0]
    if place == "hidden":
        for tensor in steps.tensors:
            tensor[bad] = NAN
        hidden = steps.replayed(batch)
        assert non_finite_chunks(hidden, [1] * 5, steps.cache.finite) == [2]
        return
    write = steps.cache.write

    def overflow(layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        key = key.clone()
        key[3, 0, 0] = float("inf")
        write(layer, slots, key, value)

    steps.cache.write = overflow  # type: ignore[method-assign]
    steps.replayed(batch)
    assert steps.cache.finite.tolist() == [True, True, True, False, True]


def test_a_step_with_anything_but_known_tokens_of_known_sizes_has_no_graph(llava: DecodeSteps) -> None:
    def changed(**parts: object) -> bool:
        batch = llava.batch(MIXED)
        for name, part in parts.items():
            holder = batch.attention if hasattr(batch.attention, name) else batch
            object.__setattr__(holder, name, part)
        return llava.graphs.fit(batch) is not None

    assert changed()
    assert not changed(prefills=[PrefillSpan(5, 9, 0, torch.tensor([1]))])
    assert not changed(merged=MergedEmbeds(torch.tensor([0]), torch.zeros(1, 4)))
    assert not changed(decode_tables=torch.zeros(5, 81, dtype=torch.int64))
    assert not changed(token_ids=torch.zeros(9, dtype=torch.int64))
    encoder_decoder = DecodeSteps(decoder_of("t5"), EagerStatic())
    batch = encoder_decoder.batch(MIXED)
    assert encoder_decoder.graphs.fit(batch) is not None
    batch.attention.cross = None
    assert encoder_decoder.graphs.fit(batch) is None


def test_a_graph_that_reads_a_tensor_on_the_host_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("llava")
    forward = decoder.forward

    def reading(embeds, positions, merged, attention):  # type: ignore[no-untyped-def]
        attention.decode_lengths.tolist()
        return forward(embeds, positions, merged, attention)

    monkeypatch.setattr(decoder, "forward", reading)
    with pytest.raises(RuntimeError, match="read on the host"):
        DecodeSteps(decoder, RecordingBackend())


def mutant_metadata_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made for all layers of a step lives on in the next replays."""
    make = DecodeGraphs._attention
    made: dict[DecodeSize, AttentionMetadata] = {}

    def once(self: DecodeGraphs, buffers: DecodeBuffers) -> AttentionMetadata:
        return made.setdefault(buffers.size, make(self, buffers))

    monkeypatch.setattr(DecodeGraphs, "_attention", once)


def mutant_lengths_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest length, read on the host, bounds what is gathered."""
    make = DecodeGraphs._attention
    longest: dict[DecodeSize, int] = {}

    def bounded(self: DecodeGraphs, buffers: DecodeBuffers) -> AttentionMetadata:
        meta = make(self, buffers)
        # As a capture reads it: once.
        maximum = longest.setdefault(buffers.size, int(meta.decode_lengths.numpy().max()))
        meta.decode_tables = meta.decode_tables[:, : -(-maximum // BLOCK)]
        return meta

    monkeypatch.setattr(DecodeGraphs, "_attention", bounded)


def mutant_tables_padded_with_the_spare_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "triptych.pd_worker.runner.decode_graphs._load_tables",
        lambda buffer, tables: buffer[: tables.shape[0], : tables.shape[1]].copy_(tables),
    )


def mutant_rows_of_the_previous_step_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is written at the capture only."""
    load = DecodeBuffers.load
    loaded: set[int] = set()

    def kept(self: DecodeBuffers, batch: Batch | None, spare: int, size: int) -> None:
        fill = torch.Tensor.fill_
        if id(self) in loaded:
            monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: tensor)
        loaded.add(id(self))
        load(self, batch, spare, size)
        monkeypatch.setattr(torch.Tensor, "fill_", fill)

    monkeypatch.setattr(DecodeBuffers, "load", kept)


@pytest.mark.parametrize(
    "mutant",
    [
        mutant_metadata_of_the_capture,
        mutant_lengths_as_numbers,
        mutant_tables_padded_with_the_spare_block,
        mutant_rows_of_the_previous_step_stay,
    ],
)
def test_mutants_are_found(mutant, monkeypatch):
    decoder = decoder_of("llava")
    mutant(monkeypatch)
    steps = DecodeSteps(decoder, EagerStatic())
    with torch.inference_mode():
        # As at a capture, with one padded token per sequence.
        for _, graph in steps.graphs._graphs.values():
            graph.run()
    assert not all(is_right(steps, steps.batch(sequences, seed)) for seed, sequences in enumerate(STEPS))
