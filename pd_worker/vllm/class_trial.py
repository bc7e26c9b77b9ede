"""The trial of a class that was not run through vLLM: whether vLLM writes pictures as this worker does."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from triptych.base.errors import ConfigError, RequestError
from triptych.base.types import ItemPlan, JsonObject
from triptych.base.vllm_classes import VLLMClass
from triptych.models.base import PreparedItem
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.registry import family_of
from triptych.pd_worker.frontend.prompt import Prompt
from triptych.pd_worker.vllm.connection import EngineConnection
from triptych.pd_worker.vllm.http.replies import EngineError, RenderedPrompt
from triptych.pd_worker.worker import PDModel

logger = logging.getLogger(__name__)

#: Width and height of the pictures that are compared.
FORMS = ((64, 64), (300, 90))
#: Begins what is said of a class that cannot be tried, or has failed.
_TRIAL = "a class that was not run through vLLM (--engine-class, docs/vllm.md): "
_PARTS = [{"type": "image"}, {"type": "text", "text": "a"}]


@dataclass(frozen=True, slots=True)
class Trial:
    """A picture as this worker prepares it, and the prompt with it."""

    image: Image.Image
    prompt: Prompt

    @property
    def rows(self) -> int:
        return self.prompt.features[0].plan.rows

    def body(self, model: str) -> JsonObject:
        """The body of a call by which vLLM writes the same prompt."""
        encoded = io.BytesIO()
        self.image.save(encoded, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, _PARTS[1]]
        return {"model": model, "messages": [{"role": "user", "content": content}]}


async def try_class(engine: EngineConnection, model: PDModel, known: VLLMClass) -> None:
    """ConfigError for a class whose pictures vLLM writes as other tokens than this worker, or not at all."""
    name = family_of(model.path).architecture
    if not model.pooling.generates:
        raise ConfigError(f"{_TRIAL}{name} generates nothing: use --engine native")
    trials = await asyncio.to_thread(make_trials, model)
    tokens = model.decoder.row_token_ids
    for trial in trials:
        size = "x".join(map(str, trial.image.size))
        try:
            theirs = await engine.client.render(trial.body(engine.info.model))
        except EngineError as error:
            raise ConfigError(
                f"{_TRIAL}vLLM does not write a picture for {name} ({error}): use --engine native"
            ) from error
        if why := disagreement(trial.prompt, theirs, tokens, known.image_kind):
            raise ConfigError(f"{_TRIAL}{name}: of a picture of {size} pixels {why}: use --engine native")
        logger.info("%s is tried: vLLM takes the %d rows of a picture of %s pixels", name, trial.rows, size)
    logger.warning(
        "%s is not known to be served alike through vLLM, since %s: the values of its rows were not "
        "compared, so compare answers with --engine native",
        name,
        known.not_run,
    )


def make_trials(model: PDModel) -> list[Trial]:
    """Pictures of several forms; ConfigError for a class that takes none."""
    side = family_of(model.path).encoder
    if not issubclass(side, GenericEncoder) or "image" not in model.prompts.modalities:
        raise ConfigError(
            f"{_TRIAL}it is tried by its pictures, and MODEL takes none in its messages: use --engine native"
        )
    encoder = side.without_weights(model.path)
    trials = []
    for size in FORMS:
        image = Image.new("RGB", size, "grey")
        try:
            plan = _plan(model, encoder.preprocess(image, {}), encoder.width)
            messages = json.dumps([{"role": "user", "content": _PARTS}]).encode()
            trials.append(Trial(image, model.prompts.build(messages, [plan])))
        except RequestError as error:
            raise ConfigError(f"{_TRIAL}{error.message}") from error
    return trials


def _plan(model: PDModel, item: PreparedItem, width: int) -> ItemPlan:
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    sizes = (item.rows, width, dtype, item.length, item.runs, item.grid_thw)
    return replace(ItemPlan("0" * 64, model.identity.namespace, "image", *sizes), layout=item.layout)


def disagreement(
    ours: Prompt, theirs: RenderedPrompt, row_tokens: Collection[int], kind: str = "image"
) -> str:
    """How a picture's tokens differ in vLLM's prompt; "" where its rows stand between the same tokens.

    `kind` is vLLM's name of the kind of pictures.
    """
    places = theirs.places(kind)
    if len(places) != 1:
        return f"vLLM makes {len(places)} items"
    place = ours.features[0].placement
    own = _rows_of(ours.token_ids[place.offset : place.end], row_tokens)
    offset, length = places[0]
    given = _rows_of(theirs.token_ids[offset : offset + length], row_tokens)
    counts = [sum(token in row_tokens for token in part) for part in (own, given)]
    if counts[0] != counts[1]:
        return f"the encoder makes {counts[0]} rows, for which vLLM writes {counts[1]} tokens"
    return "" if own == given else "vLLM writes other tokens between the rows"


def _rows_of(token_ids: Sequence[int], row_tokens: Collection[int]) -> list[int]:
    """From the first token that takes a row to the last."""
    at = [index for index, token in enumerate(token_ids) if token in row_tokens]
    return list(token_ids[at[0] : at[-1] + 1]) if at else []
