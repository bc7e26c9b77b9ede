"""Calls of vLLM's AsyncLLM in this process, with the failures that a vLLM server's calls have."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch
from vllm import __version__ as vllm_version
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import mm_input
from vllm.inputs.engine import tokens_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from triptych.pd_worker.vllm.in_process.step_log import StepLog
from triptych.pd_worker.vllm.port.call import EngineCall, probe_call, size_of
from triptych.pd_worker.vllm.port.chunks import (
    ChosenToken,
    PromptDetails,
    RankedToken,
    StreamChoice,
    StreamChunk,
    StreamUsage,
    TokenLogprobs,
)
from triptych.pd_worker.vllm.port.client import EngineInfo
from triptych.pd_worker.vllm.port.errors import (
    EngineError,
    EngineFailed,
    EngineRejected,
    EngineSilent,
    EngineUnreachable,
    error_of_status,
    printable,
)
from triptych.types import ItemPlan

#: What vLLM writes in place of a log-probability that JSON has no number for.
_LEAST_LOGPROB = -9999.0


class AsyncLLMClient:
    """The engine `llm`, whose steps `log` counts. A dead one never comes back."""

    def __init__(self, llm: AsyncLLM, log: StepLog) -> None:
        self._llm = llm
        self._log = log

    @property
    def step_state(self) -> tuple[float, int]:
        """The KV cache's usage after the last step, and the preemptions so far."""
        return self._log.kv_cache_usage, self._log.preemptions

    async def info(self) -> EngineInfo:
        model = self._llm.model_config
        return EngineInfo(vllm_version, model.served_model_name, model.model, model.max_model_len)

    async def check_health(self) -> None:
        if self._llm.errored:
            raise _dead()

    async def steps(self) -> bytes:
        return str(self._log.steps).encode()

    async def probe(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout), self.generate(probe_call()) as chunks:
                async for _ in chunks:
                    pass
        except TimeoutError as error:
            raise EngineSilent(f"no token in {timeout:g} s") from error

    @asynccontextmanager
    async def generate(self, call: EngineCall) -> AsyncIterator[AsyncIterator[StreamChunk]]:
        outputs = self._outputs(call)
        try:
            yield outputs
        finally:
            # Ends the request in the engine, where it has not ended.
            await outputs.aclose()

    async def _outputs(self, call: EngineCall) -> AsyncGenerator[StreamChunk, None]:
        outputs: AsyncGenerator[Any, None] | None = None
        try:
            outputs = self._llm.generate(engine_input(call), sampling_of(call), uuid.uuid4().hex)
            async for output in outputs:
                yield chunk_of(output)
        except EngineError:
            raise
        except Exception as error:
            raise error_of(error) from error
        finally:
            if outputs is not None:
                await outputs.aclose()

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)


def sampling_of(call: EngineCall) -> SamplingParams:
    """vLLM's parameters of a call, token by token as they come."""
    params = dict(call.sampling_params)
    if (format_ := params.get("structured_outputs")) is not None:
        params["structured_outputs"] = StructuredOutputsParams(**format_)
    if (biases := params.get("logit_bias")) is not None:
        params["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    if call.features:
        params["extra_args"] = {"ec_transfer_params": call.ec_transfer_params}
    return SamplingParams(**params, output_kind=RequestOutputKind.DELTA)


def engine_input(call: EngineCall) -> Any:
    """The prompt as vLLM's renderer would give it, its items without pixels."""
    salt = call.cache_salt or None
    if not call.features:
        return tokens_input(call.token_ids, cache_salt=salt)
    items = call.by_modality
    return mm_input(
        prompt_token_ids=call.token_ids,
        mm_kwargs=MultiModalKwargsItems(
            {modality: [_item(each.plan) for each in found] for modality, found in items.items()}
        ),
        mm_hashes={modality: [each.mm_hash for each in found] for modality, found in items.items()},
        mm_placeholders={
            modality: [
                PlaceholderRange(offset=each.placement.offset, length=each.placement.length) for each in found
            ]
            for modality, found in items.items()
        },
        cache_salt=salt,
    )


def _item(plan: ItemPlan) -> MultiModalKwargsItem:
    """The item without pixels."""
    name, numbers = size_of(plan)
    data = torch.tensor(numbers, dtype=torch.int64)
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=True))}
    )


def chunk_of(output: Any) -> StreamChunk:
    """vLLM's output of one step. EngineFailed where the request has failed."""
    choices = []
    for one in output.outputs:
        if one.finish_reason == "error":
            raise EngineFailed("the request failed in the engine")
        token_ids = list(one.token_ids)
        logprobs = None if one.logprobs is None else _logprobs(token_ids, one.logprobs)
        choices.append(StreamChoice(token_ids, one.finish_reason, logprobs))
    return StreamChunk(choices, StreamUsage(PromptDetails(output.num_cached_tokens)))


def _logprobs(token_ids: list[int], found: Any) -> TokenLogprobs:
    content = []
    for token_id, ranked in zip(token_ids, found, strict=True):
        top = [RankedToken(each, _number(one.logprob), one.rank or None) for each, one in ranked.items()]
        chosen = ranked.get(token_id)
        logprob = _LEAST_LOGPROB if chosen is None else _number(chosen.logprob)
        content.append(ChosenToken(token_id, logprob, top_logprobs=top))
    return TokenLogprobs(content)


def _number(logprob: float) -> float:
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def error_of(error: BaseException) -> EngineError:
    """What an exception of vLLM means for the request."""
    if isinstance(error, EngineDeadError):
        return _dead()
    if isinstance(error, GracefulHTTPError):
        return error_of_status(int(_of(error, "http_status", 503)), str(error))
    if isinstance(error, VLLMClientError | msgspec.ValidationError | ValueError | TypeError):
        return EngineRejected(400, printable(str(error)), _of(error, "parameter", None) or "")
    if error.__cause__ is not None:
        # What `generate` did not expect is the cause of an error of its own.
        return error_of(error.__cause__)
    return EngineFailed(printable(f"{type(error).__name__}: {error}"))


def _of(error: BaseException, name: str, default: Any) -> Any:
    values: Mapping[str, Any] = vars(error)
    return values.get(name, default)


def _dead() -> EngineUnreachable:
    return EngineUnreachable("the engine's process has ended; its log above says why")
