"""Waterfall of a call: its moments as spans. Pure: a record in, spans out."""

from __future__ import annotations

from triptych.proxy.live.call_record import CallRecord
from triptych.proxy.live.item_spans import item_spans
from triptych.proxy.live.names import short_address
from triptych.proxy.live.objects import StageSpan, Waterfall
from triptych.proxy.live.request_phases import RequestPhase, request_phases
from triptych.proxy.requests.timeline import TIMED_ITEMS

#: Digits of a second that are shown: microseconds.
_DIGITS = 6


def waterfall(record: CallRecord, now: float) -> Waterfall:
    """Where the call's time went, up to its end or `now`."""
    timeline, start = record.timeline, record.started
    end = now if record.ended is None else record.ended
    phases = request_phases(timeline.moments, start, timeline.items, timeline.rest)
    spans = [*_tiles(phases, start, end)]
    for found in item_spans(timeline.moments, end):
        spans.append(_clipped(found, start, end))
    if timeline.rest is not None:
        note = f"{timeline.items - TIMED_ITEMS} further items, summed"
        summed = StageSpan("encode", *timeline.rest, "", TIMED_ITEMS, note)
        spans.append(_clipped(summed, start, end))
    return Waterfall(
        id=record.label,
        model=record.model,
        started=record.started_at,
        seconds=None if record.ended is None else round(end - start, _DIGITS),
        status=record.status,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=timeline.cached_tokens,
        choices=record.choices,
        attempts=timeline.attempt,
        items=timeline.items,
        spans=spans,
    )


def _tiles(phases: list[RequestPhase], start: float, end: float) -> list[StageSpan]:
    """Each phase up to the next one: no gap and no overlap from 0 to the end."""
    tiles = []
    for phase, after in zip(phases, [*(phase.at for phase in phases[1:]), end], strict=True):
        tile = StageSpan(phase.name, phase.at, after, phase.where, None, phase.note, phase.attempt)
        tile = _clipped(tile, start, end)
        if tile.end > tile.start:
            tiles.append(tile)
    return tiles


def _clipped(span: StageSpan, start: float, end: float) -> StageSpan:
    """The part of a span inside the call, in seconds since its arrival."""

    def moment(at: float) -> float:
        return round(min(max(at, start), end) - start, _DIGITS)

    begin = moment(span.start)
    until = max(moment(span.end), begin)
    where = short_address(span.where)
    return StageSpan(span.name, begin, until, where, span.item, span.note, span.attempt)
