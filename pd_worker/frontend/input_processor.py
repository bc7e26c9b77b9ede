"""The input processor: turns Submit messages into engine requests within the limits of their items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from triptych.base.config import format_size
from triptych.base.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, Unavailable
from triptych.base.hashing import prefix_root
from triptych.base.request import MAX_TENANT_SALT, MAX_TOKEN_VECTORS
from triptych.base.types import ItemPlan, OutputFormat, SamplingParams
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.models.checkpoint.pooling import GENERATES, PoolingDefaults
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.sampling import NO_SAMPLING, NoText, bad_word_ids, resolve
from triptych.pd_worker.frontend.call_grammar import CALLS, strict_calls
from triptych.pd_worker.frontend.chat_template import parse_tools
from triptych.pd_worker.frontend.encdec_prompt import EncDecPrompts
from triptych.pd_worker.frontend.grammar import Formats, FormatState
from triptych.pd_worker.frontend.prompt import Prompt, PromptBuilder
from triptych.pd_worker.frontend.reasoning import Reasoning, ReasoningMask, ReasoningPhase
from triptych.pd_worker.frontend.speech import transcription_chat
from triptych.pd_worker.frontend.tokenization import (
    MarkerDecoder,
    OutputText,
    TimelessDecoder,
    TokenDecoder,
    timestamp_tokens,
)
from triptych.pd_worker.frontend.wire import (
    check_label,
    check_name,
    checked_plan,
    resolve_pooling,
    template_from_proto,
)
from triptych.pd_worker.item_limits import ItemLimit
from triptych.protos import pd_pb2
from triptych.protos.convert import in_state, kv_from_proto, sampling_from_proto

#: A week, in seconds.
_MAX_TIMEOUT = 604800.0


class InputProcessor:
    """Thread-safe. What it remembers of a tenant's texts no other tenant's requests find.

    `encoder_cache_bytes` bounds the distinct items of one request.
    """

    def __init__(
        self,
        *,
        model_key: str,
        prompts: PromptBuilder,
        tokenizer: TokenDecoder,
        decoder: DecoderSide,
        defaults: GenerationDefaults,
        max_model_len: int,
        encoder_cache_bytes: int,
        grammars: Formats,
        two_prompts: EncDecPrompts | None = None,
        pooling: PoolingDefaults = GENERATES,
        item_limits: Mapping[str, ItemLimit] | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        #: Names in the engine, by key.
        self._adapters = adapters
        self._pooling = pooling
        self._item_limits = item_limits or {}
        self._two_prompts = two_prompts
        self._timestamps = timestamp_tokens(defaults)
        self._grammars = grammars
        self._model_key = model_key
        self._prompts = prompts
        self._tokenizer = tokenizer
        #: Detokenizes output tokens.
        self._detokenizer = (
            tokenizer if self._timestamps is None else TimelessDecoder(tokenizer, self._timestamps)
        )
        self._decoder = decoder
        self._row_width = decoder.row_width
        self._defaults = defaults
        self._max_model_len = max_model_len
        self._encoder_cache_bytes = encoder_cache_bytes

    def process(self, message: pd_pb2.SubmitRequest, arrival: float) -> EngineRequest:
        """The request that `message` asks for; `arrival` in seconds of time.monotonic. RequestError."""
        self._check_names(message)
        plans = [checked_plan(slot.plan) for slot in message.items]
        self._check_plans(plans)
        resume = message.resume if message.HasField("resume") else None
        if message.HasField("pooling"):
            return self._pooled(message, arrival, plans, resume)
        if self._pooling.task != "generate":
            paths = "/pooling" if self._pooling.task == "token_embed" else "/v1/embeddings"
            raise InvalidRequest(
                f"this model generates nothing: use POST {paths} or /v1/rerank", param="model"
            )
        two = None if self._two_prompts is None else self._two_prompts.build(message, plans)
        prompt = self._prompt(message, resume, plans) if two is None else two.prompt
        chat = two is None and not message.HasField("prompt")
        params = sampling_from_proto(message.sampling)
        if chat and params.output_format is None and not params.ignore_eos:
            params = replace(params, output_format=self._calls(message.template))
        sampling = resolve(
            params,
            self._defaults,
            len(prompt.token_ids),
            self._max_model_len,
            "messages" if chat else "prompt",
            self._decoder.geometry.vocab_size,
        )
        if params.bad_words:
            encode = partial(self._prompts.guarded.encode_raw, add_special_tokens=False)
            sampling = replace(sampling, bad_word_ids=bad_word_ids(params.bad_words, encode))
        received = list(resume.output_token_ids) if resume else []
        self._check_received(received, len(prompt.token_ids))
        reasoning = self._prompts.reasoning if chat else None
        if params.output_format is not None and not self._grammars.after_reasoning:
            reasoning = None
        phase = ReasoningPhase.ANSWER if reasoning is None else reasoning.phase(prompt.token_ids)
        decoder: TokenDecoder = self._detokenizer
        if chat and (self._prompts.kept or self._prompts.dropped):
            decoder = MarkerDecoder(decoder, self._prompts.kept, self._prompts.dropped)
        output = OutputText(decoder, sampling, received, resume.text_sent_chars if resume else 0)
        options = {} if two is None else two.options
        request = EngineRequest(
            **self._fields(message, arrival, prompt),
            sampling=sampling,
            prefix_root=prefix_root(self._model_key, message.salt, message.adapter),
            output=output,
            output_token_ids=received,
            resumed_tokens=len(received),
            planned=resume is not None and resume.planned,
            may_hand_over=message.may_hand_over,
            kv=None if resume is None or not resume.HasField("kv") else kv_from_proto(resume.kv, arrival),
            cached_tokens=_told_cached(resume, len(prompt.token_ids)),
            grammar=self._mask(params, reasoning, phase, received, output),
            logits_rules=self._decoder.logits_rules(
                self._defaults, {**options, "max_tokens": sampling.max_tokens}
            ),
            encoder_prompt_token_ids=() if two is None else two.encoder_token_ids,
            timestamps=self._timestamps if options.get("timestamps") else None,
            reasoning=None if reasoning is None else reasoning.told(phase),
            tool_format=self._prompts.tool_format if chat else "",
        )
        if sampling.reads_prompt:
            _ = request.distinct_prompt_ids  # here, and not in the engine's thread
        return request

    def _pooled(
        self,
        message: pd_pb2.SubmitRequest,
        arrival: float,
        plans: Sequence[ItemPlan],
        resume: pd_pb2.Resume | None,
    ) -> EngineRequest:
        if self._two_prompts is not None:
            raise InvalidRequest(
                "this encoder-decoder model gives no embeddings: it generates", param="model"
            )
        pooling = resolve_pooling(message.pooling, self._pooling, self._decoder.geometry.hidden_size)
        if pooling.scores and not (resume and resume.prompt_token_ids):
            prompt = self._prompts.build_pair(message.messages, plans, by_words=bool(pooling.score_ids))
        else:
            prompt = self._prompt(message, resume, plans)
        if len(prompt.token_ids) > self._max_model_len:
            raise ContextTooLong(
                f"{len(prompt.token_ids)} tokens are above the {self._max_model_len} that the model takes: "
                "send less",
                param="prompt" if pooling.scores or message.HasField("prompt") else "messages",
            )
        size = 4 * (pooling.dimensions or self._pooling.width) * len(prompt.token_ids)
        if pooling.of_tokens and not pooling.query and size > MAX_TOKEN_VECTORS:
            raise ContextTooLong(
                f"the vectors of {len(prompt.token_ids)} tokens have {size} bytes, above the "
                f"{MAX_TOKEN_VECTORS} that one prompt may give: send less, or ask for fewer dimensions",
                param="prompt" if message.HasField("prompt") else "messages",
            )
        # Of rows that a cached prefix would leave out: only this attempt's own blocks are of use to it.
        names = (message.proxy_id, message.request_id, str(message.attempt)) if pooling.reads_all_rows else ()
        return EngineRequest(
            **self._fields(message, arrival, prompt),
            sampling=NO_SAMPLING,
            prefix_root=prefix_root(self._model_key, "/".join((message.salt, *names)), message.adapter),
            output=NoText(),
            pooling=pooling,
        )

    def _check_vocabulary(self, prompt: Prompt, param: str) -> None:
        """InvalidRequest for a token that the model has no row for, which would fail all of its step.

        Tokenizers of published checkpoints have such: BART's `<mask>` beside a vocabulary that was cut.
        """
        size = self._decoder.geometry.vocab_size
        if max(prompt.token_ids, default=0) < size:
            return
        places = [feature.placement for feature in prompt.features]
        for at, token in enumerate(prompt.token_ids):
            if token >= size and not any(one.offset <= at < one.offset + one.length for one in places):
                raise InvalidRequest(
                    f"{param}: its text has the token {token}, and the model's vocabulary ends at "
                    f"{size - 1}: leave the special token out",
                    param=param,
                )

    def _fields(self, message: pd_pb2.SubmitRequest, arrival: float, prompt: Prompt) -> dict[str, Any]:
        """The fields of every request, generated or pooled."""
        self._check_vocabulary(prompt, "prompt" if message.HasField("prompt") else "messages")
        given = self._decoder.prompt_inputs(prompt.token_ids, prompt.features)
        return {
            "request_id": message.request_id,
            "attempt": message.attempt,
            "proxy_id": message.proxy_id,
            "label": message.label,
            "tenant": message.tenant,
            "adapter": self._adapters.get(message.adapter, ""),
            "priority": message.priority,
            "arrival": arrival,
            "deadline": arrival + message.timeout,
            "prompt_token_ids": prompt.token_ids,
            "features": prompt.features,
            "ready": in_state(message, pd_pb2.ITEM_STATE_READY),
            "unencoded": in_state(message, pd_pb2.ITEM_STATE_UNENCODED),
            "positions": given.positions,
            "position_delta": given.delta,
            "both_ways": given.spans,
            "inputs": given.inputs,
        }

    def tokenize(self, message: pd_pb2.TokenizeRequest) -> pd_pb2.TokenizeReply:
        """The token ids that Submit would make of this prompt, items not expanded. RequestError."""
        if message.HasField("prompt"):
            if message.messages:
                raise InvalidRequest("prompt stands alone, without messages", param="prompt")
            token_ids: Sequence[int] = self._raw_prompt(message.prompt).token_ids
        elif self._two_prompts is not None:
            raise InvalidRequest(
                "messages: an encoder-decoder model knows no conversations: send prompt", param="messages"
            )
        else:
            token_ids = self._prompts.tokenize(message.messages, template_from_proto(message.template))
        return pd_pb2.TokenizeReply(token_ids=token_ids, max_model_len=self._max_model_len)

    def detokenize(self, message: pd_pb2.DetokenizeRequest) -> pd_pb2.DetokenizeReply:
        """The text of the ids, special tokens included unless they are unwanted. RequestError."""
        self._check_tokens(message.token_ids, "tokens", "tokens")
        text = self._detokenizer.decode(
            list(message.token_ids), skip_special_tokens=message.skip_special_tokens
        )
        return pd_pb2.DetokenizeReply(text=text)

    def _calls(self, template: pd_pb2.TemplateOptions) -> OutputFormat | None:
        """What holds calls to functions that are `strict`, from their marker on; None where nothing does."""
        begun = template.continue_final_message
        if b'"strict"' not in template.tools or begun or not self._grammars.after_reasoning:
            return None
        form = strict_calls(parse_tools(template.tools), self._prompts.tool_format)
        try:
            return form and self._grammars.state(form).output_format
        except InvalidRequest as error:
            reason = error.message.partition(": ")[2]
            raise InvalidRequest(f"tools: {reason}; or leave strict out", param="tools") from error

    def _mask(
        self,
        params: SamplingParams,
        reasoning: Reasoning | None,
        phase: ReasoningPhase,
        received: Sequence[int],
        output: OutputText,
    ) -> FormatState | None:
        budget = params.thinking_token_budget
        if budget is not None and (reasoning is None or not self._grammars.after_reasoning):
            raise InvalidRequest(
                "thinking_token_budget: this worker limits no reasoning: its model has none, "
                "--reasoning-parser is none, or its engine is vLLM: leave it out",
                param="thinking_token_budget",
            )
        if output.finished is not None:
            return None
        for form in _forms(params.output_format, begun=bool(received)):
            mask: FormatState | None = None
            if form is not None:
                mask = self._grammars.state(form)
            if (
                reasoning is not None
                and phase is not ReasoningPhase.ANSWER
                and (mask is not None or budget is not None)
            ):
                mask = ReasoningMask(reasoning, phase, mask, budget, self._defaults.eos_token_ids)
            if mask is None or mask.follow(received):
                return mask
        raise InvalidRequest("output_token_ids do not fit response_format", param="resume")

    def _check_names(self, message: pd_pb2.SubmitRequest) -> None:
        for field in ("request_id", "proxy_id"):
            check_name(field, getattr(message, field))
        check_label(message.label)
        if message.attempt < 1:
            raise InvalidRequest("attempt counts from 1", param="attempt")
        if message.model_key != self._model_key:
            # Another worker may serve it: the proxy tries the next one.
            raise Unavailable("this worker serves another model_key", param="model_key", retry_after=1.0)
        if message.adapter and message.adapter not in self._adapters:
            raise Unavailable("this worker does not have the adapter", param="model", retry_after=1.0)
        if not message.timeout > 0:
            raise DeadlineExceeded("the request's time is over", param="timeout")
        if message.timeout > _MAX_TIMEOUT:
            raise InvalidRequest(f"timeout must be at most {_MAX_TIMEOUT:.0f} seconds", param="timeout")
        if len(message.salt) > MAX_TENANT_SALT:
            raise InvalidRequest(f"salt must have at most {MAX_TENANT_SALT} characters", param="salt")

    def _check_plans(self, plans: Sequence[ItemPlan]) -> None:
        cross, width = self._decoder.cross, self._row_width
        distinct: dict[str, ItemPlan] = {}
        for plan in plans:
            if plan.modality not in self._decoder.modalities:
                known = " or ".join(self._decoder.modalities)
                raise InvalidRequest(f"an item's modality must be {known}", param="items")
            if (plan.length == 0) is (cross is None):
                raise InvalidRequest("an item has a placeholder, unless it is an encoder's", param="items")
            if plan.width != width:
                raise InvalidRequest(
                    f"an item's embeddings are {plan.width} wide, but this model takes {width}", param="items"
                )
            if distinct.setdefault(plan.mm_hash, plan) != plan:
                raise InvalidRequest("two plans of one mm_hash differ", param="items")
        whole = [plan for plan in plans if not self._decoder.continues(plan)]
        check_item_counts(whole, self._item_limits)
        what = "images of messages" if cross is None else "encoder prompt"
        param = "messages" if cross is None else "encoder_prompt"
        tokens = sum(plan.length for plan in plans)
        if tokens >= self._max_model_len:
            raise ContextTooLong(
                f"the images of messages take {tokens} tokens, but the model takes {self._max_model_len} "
                "with text and output: send fewer or smaller images",
                param="messages",
            )
        nbytes = sum(plan.nbytes for plan in distinct.values())
        if nbytes > self._encoder_cache_bytes:
            raise InvalidRequest(
                f"the {what} needs {format_size(nbytes)} of embeddings, but "
                f"--encoder-cache-memory is {format_size(self._encoder_cache_bytes)}: "
                "send less, or raise it",
                param=param,
            )

    def _prompt(
        self, message: pd_pb2.SubmitRequest, resume: pd_pb2.Resume | None, plans: Sequence[ItemPlan]
    ) -> Prompt:
        if resume is not None and resume.prompt_token_ids:
            places = [(place.offset, place.length) for place in resume.placements]
            return self._prompts.resume(tuple(resume.prompt_token_ids), places, plans)
        if message.HasField("transcription"):
            kind = getattr(getattr(self._decoder, "config", None), "model_type", "")
            messages, options = transcription_chat(message.transcription, kind)
            return self._prompts.build(messages, plans, options)
        if not message.HasField("prompt"):
            return self._prompts.build(message.messages, plans, template_from_proto(message.template))
        if message.messages or plans:
            raise InvalidRequest("prompt stands alone, without messages and items", param="prompt")
        return self._raw_prompt(message.prompt)

    def _raw_prompt(self, prompt: pd_pb2.RawPrompt) -> Prompt:
        if prompt.WhichOneof("body") == "token_ids":
            return self._prompts.build_token_ids(prompt.token_ids.ids)
        return self._prompts.build_text(prompt.text)

    def _check_received(self, received: Sequence[int], prompt_len: int) -> None:
        if prompt_len + len(received) > self._max_model_len:
            raise ContextTooLong(
                f"prompt and output have {prompt_len + len(received)} tokens, but the model takes "
                f"{self._max_model_len}",
                param="resume",
            )
        self._check_tokens(received, "output_token_ids", "resume")

    def _check_tokens(self, token_ids: Sequence[int], name: str, param: str) -> None:
        vocab_size = self._decoder.geometry.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequest(f"{name} must be from 0 to {vocab_size - 1}", param=param)


def _told_cached(resume: pd_pb2.Resume | None, prompt_tokens: int) -> int | None:
    """What an earlier attempt's prefix cache gave of the prompt; None where nobody has said it."""
    if resume is None or not resume.HasField("cached_tokens"):
        return None
    return min(resume.cached_tokens, prompt_tokens)


def _forms(form: OutputFormat | None, *, begun: bool) -> tuple[OutputFormat | None, ...]:
    """What an output may be held to: another worker may have `begun` it that left more open."""
    if form is None or not begun or form.open:
        return (form,)
    return form, None if form.kind == CALLS else replace(form, open=True)


def check_item_counts(plans: Sequence[ItemPlan], limits: Mapping[str, ItemLimit]) -> None:
    """InvalidRequest for more items of a modality than its limit."""
    for modality, count in Counter(plan.modality for plan in plans).items():
        limit = limits.get(modality)
        if limit is not None and count > limit.count:
            raise InvalidRequest(
                f"{count} {modality}s are more than the {limit.count} that this server takes in a prompt; "
                "send fewer",
                param="messages",
            )
