"""Whether the tokens that vLLM writes for a picture are those of this worker."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from support.data.checkpoints import build_checkpoint
from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.base.vllm_classes import VLLMClass
from triptych.pd_worker import service
from triptych.pd_worker.frontend.prompt import Prompt
from triptych.pd_worker.vllm.class_trial import disagreement
from triptych.pd_worker.vllm.http.replies import PlaceholderRange, RenderedItems, RenderedPrompt

ROW, BREAK, START, END = 319, 314, 316, 315
ROWS = frozenset({ROW})
ITEM = [ROW, ROW, BREAK, ROW, ROW]


def ours(item: list[int] = ITEM) -> Prompt:
    plan = ItemPlan("0" * 64, "n", "image", item.count(ROW), 8, "float32", len(item))
    return Prompt((5, START, *item, END, 6), (MMFeature(plan, Placement(2, len(item))),))


def theirs(tokens: list[int], *places: tuple[int, int]) -> RenderedPrompt:
    ranges = [PlaceholderRange(offset, length) for offset, length in places]
    return RenderedPrompt(tokens, RenderedItems({"image": ranges} if ranges else {}))


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        ([5, START, *ITEM, END, 6], (2, 5)),
        # Its placeholder has the marks around it, and its prompt begins otherwise.
        ([1, 5, START, *ITEM, END, 6], (2, 7)),
    ],
)
def test_the_same_tokens_from_the_first_row_to_the_last_agree(tokens, place):
    assert disagreement(ours(), theirs(tokens, place), ROWS) == ""


@pytest.mark.parametrize(
    ("rendered", "says"),
    [
        (theirs([5, ROW, ROW, 6], (1, 2)), "makes 4 rows, for which vLLM writes 2 tokens"),
        (theirs([ROW, ROW, ROW, ROW], (0, 4)), "other tokens between the rows"),
        (theirs([ROW, BREAK, ROW, ROW, ROW], (0, 5)), "other tokens between the rows"),
        (theirs([5, 6]), "0 items"),
        (theirs([*ITEM, *ITEM], (0, 5), (5, 5)), "2 items"),
        (RenderedPrompt([5, 6]), "0 items"),
    ],
)
def test_other_tokens_are_told(rendered, says):
    assert says in disagreement(ours(), rendered, ROWS)


@pytest.mark.parametrize("not_run", ["", "vLLM ends with it here"])
async def test_a_class_that_was_not_run_is_tried_before_it_is_served(not_run, tmp_path, monkeypatch):
    model = SimpleNamespace(path=build_checkpoint("qwen3_vl", tmp_path / "model"))
    known = VLLMClass(not_run=not_run)
    info = SimpleNamespace(version="", root="", max_model_len=9, speculates=False, adapters=())

    @asynccontextmanager
    async def connected(*_):
        yield SimpleNamespace(info=info, health=None)

    def ends(reason):
        async def end(*given):
            assert reason != "tried" or given[1:] == (model, known)
            raise ConfigError(reason)

        return end

    monkeypatch.setattr(service, "connected", connected)
    monkeypatch.setattr(service, "load_front_model", lambda *_: model)
    monkeypatch.setattr(service, "class_of", lambda *_, **__: known)
    monkeypatch.setattr(service, "try_class", ends("tried"))
    monkeypatch.setattr(service, "proven_tickets", ends("served"))
    process = SimpleNamespace(stop=asyncio.Event())
    with pytest.raises(ConfigError, match="tried" if not_run else "served"):
        await service._serve_vllm(PDConfig(model=str(model.path)), process)
