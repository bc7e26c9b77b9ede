"""The model runner: executes a step on the device, from transfers to sampled tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from triptych.base.errors import InternalError
from triptych.base.machine.device import Device
from triptych.base.machine.device_fault import check_device, failure_of
from triptych.base.machine.graphs import GraphBackend
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.int8_rows import rows_of
from triptych.ec_connector.mixin import ECConnectorModelRunnerMixin
from triptych.models.base import DecoderSide
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.pd_worker.attention.metadata import PagedKVCache
from triptych.pd_worker.core.outputs import ModelRunnerOutput, Projection, ScheduledChunk, SchedulerOutput
from triptych.pd_worker.runner.batch import Batch, BatchBuilder, batch_digest
from triptych.pd_worker.runner.decode_graphs import DecodeGraphs, DecodeSize
from triptych.pd_worker.runner.host_kv_cache import HostKVCache, copy_blocks
from triptych.pd_worker.runner.pooler import add_chunks, score
from triptych.pd_worker.runner.sampler import SamplerInput, raw_logprobs, read_logprobs, sample, select
from triptych.pd_worker.runner.state_pool import StatePool, groups_of

logger = logging.getLogger(__name__)


class ModelRunner(ECConnectorModelRunnerMixin):
    """Decoder, KV cache and encoder cache of one rank."""

    def __init__(
        self,
        decoder: DecoderSide,
        *,
        num_blocks: int,
        block_size: int,
        backend: str = "sdpa",
        num_host_blocks: int = 0,
        parallel: TensorParallel | None = None,
        spare_block: bool = False,
        num_slots: int = 0,
        num_host_slots: int = 0,
    ) -> None:
        """`parallel` is this rank's place where the decoder is one of several ranks' shares.

        `spare_block`: one more block, which is no request's; `use_graphs` needs it.
        """
        geometry = decoder.geometry
        Device.of(decoder.device).select()
        self._decoder = decoder
        self._parallel = parallel
        self.encoder_cache: dict[str, EncoderOutput] = {}
        self.kv_cache = PagedKVCache.of_decoder(
            decoder, num_blocks=num_blocks + spare_block, block_size=block_size
        )
        #: Host memory for preempted requests, with --preemption swap.
        self.host_cache = HostKVCache(self.kv_cache, num_host_blocks)
        self._states: StatePool | None = None
        if geometry.states:
            self._states = StatePool(geometry.states, num_slots, num_host_slots, decoder.device)
        self._graphs: DecodeGraphs | None = None
        self._backend = backend
        self._builder = BatchBuilder(self.kv_cache, decoder, backend=backend)

    def use_graphs(self, backend: GraphBackend | None, sizes: Sequence[DecodeSize] = ()) -> None:
        """Captures steps of decodes alone in these sizes, to replay them from now on; None: no graphs.

        Raises what the capture raises; steps are then computed as before.
        """
        self._graphs = None
        if backend is None:
            return
        spare = len(self.kv_cache.keys[0]) - 1
        graphs = DecodeGraphs(
            self._decoder, self.kv_cache, backend, sizes, spare_block=spare, attention_backend=self._backend
        )
        graphs.capture()
        self._graphs = graphs

    @property
    def states(self) -> StatePool | None:
        """The states of recurrent layers; None without any."""
        return self._states

    @property
    def position_rows(self) -> int:
        return self._decoder.geometry.position_rows

    @property
    def vocab_size(self) -> int:
        return self._decoder.geometry.vocab_size

    @property
    def graph_bytes(self) -> int:
        """Bytes of the static buffers of decode graphs."""
        return 0 if self._graphs is None else self._graphs.buffer_bytes

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._decoder.module.parameters())

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Executes one step. A model failure is `error` in the output; transfers are reported anyway."""
        for key in scheduled.evicted:
            self.encoder_cache.pop(key, None)
        output = ModelRunnerOutput()
        with self.maybe_get_ec_connector_output(scheduled, self.encoder_cache) as moved:
            self._run(scheduled, output)
        if moved is not None:
            output.ec_connector_output = moved
        return output

    def _run(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        self._swap(scheduled, output)
        if scheduled.swap_in:
            output.swapped_in = self._all_ranks(output.swapped_in)
        chunks = scheduled.computable(swapped_in=output.swapped_in)
        try:
            output.unprojected = frozenset(
                projection.mm_hash
                for projection in scheduled.projections
                if not self._succeeds("a projection", partial(self._project, projection))
            )
            if self._states is not None:
                self._states.restore(scheduled.states_restored)
            if chunks:
                self._compute(chunks, output)
        except Exception as error:
            check_device(error, self._decoder.device)
            logger.exception("step %d failed", scheduled.step)
            output.error = failure_of(error, self._decoder.device, "a step of this request")
        if scheduled.swap_out:
            output.swapped_out = output.swapped_out and self._succeeds("a swap", self.host_cache.wait)

    def ec_transfers_failed(self, error: Exception) -> None:
        check_device(error, self._decoder.device)

    @torch.inference_mode()
    def _swap(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Copies out first, since blocks are reused by copies in. Failed copies fail nothing else."""
        if not scheduled.swap_out and not scheduled.swap_in:
            output.swapped_out = output.swapped_in = True
            return
        output.swapped_out = self._succeeds("a swap", partial(self._swap_out, scheduled))
        output.swapped_in = self._succeeds("a swap", partial(self._swap_in, scheduled))

    def _swap_out(self, scheduled: SchedulerOutput) -> None:
        copy_blocks(self.kv_cache, self.host_cache, scheduled.swap_out)
        if self._states is not None:
            self._states.swap_out(scheduled.states_out)

    def _swap_in(self, scheduled: SchedulerOutput) -> None:
        copy_blocks(self.host_cache, self.kv_cache, scheduled.swap_in)
        if self._states is not None:
            self._states.swap_in(scheduled.states_in)

    def _all_ranks(self, succeeded: bool) -> bool:
        """Whether all ranks succeeded: each has to compute the same chunks."""
        if self._parallel is None:
            return succeeded
        count = torch.tensor([float(succeeded)], device=self._decoder.device)
        return int(self._parallel.all_reduce(count)) == self._parallel.size

    def _succeeds(self, what: str, work: Callable[[], None]) -> bool:
        """Runs one part of the step; False, with a log entry, where it fails."""
        try:
            work()
        except Exception as error:
            check_device(error, self._decoder.device)
            logger.exception("%s failed", what)
            return False
        return True

    @torch.inference_mode()
    def _project(self, projection: Projection) -> None:
        """Writes the cross-attention keys and values of an item."""
        rows = rows_of(self.encoder_cache[projection.mm_hash], 0, projection.rows)
        slots = self.kv_cache.slots(projection.block_ids, projection.rows)
        layers = self._decoder.project_cross(rows.to(self._decoder.device, self._decoder.dtype))
        for key, value in layers:
            check_projection(key, value)
        for layer, (key, value) in enumerate(layers):
            self.kv_cache.write(layer, slots, key, value)

    @torch.inference_mode()
    def _compute(self, chunks: list[ScheduledChunk], output: ModelRunnerOutput) -> None:
        """Writes the sampled tokens into `output`, in the order of `chunks`. Only rank 0 samples."""
        batch = self._builder.build(chunks, self.encoder_cache)
        ordered = batch.chunks
        if self._parallel is not None:
            output.batch_digest = batch_digest(ordered)
        hidden = self._hidden(batch, output)
        inputs = [sampler_input(chunk) for chunk in batch.sampling if not chunk.pools]
        logits, chosen = self._choose(hidden, batch, inputs)
        # The step's only wait for the device: for its tokens, and whether its output is finite.
        numbers = torch.cat([chosen, all_finite(hidden, self.kv_cache.finite)]).tolist()
        if not numbers.pop():
            non_finite = non_finite_chunks(hidden, [chunk.count for chunk in ordered], self.kv_cache.finite)
            hidden = self._forget(non_finite, ordered, batch, hidden)
            gone = {id(ordered[index]) for index in non_finite}
            output.non_finite = frozenset(i for i, chunk in enumerate(chunks) if id(chunk) in gone)
            logits, chosen = self._choose(hidden, batch, inputs)
            numbers = chosen.tolist()
        pools = any(chunk.state.request.pooling is not None for chunk in ordered)
        pooled = add_chunks(ordered, hidden, self._decoder.logits) if pools else {}
        if batch.sampling:
            if self._parallel is not None and self._parallel.rank:
                return
            pooled |= _scores(batch.sampling, logits)
            _add_tokens(output, chunks, batch.sampling, numbers, inputs)
        if pooled:
            output.pooled = {i: pooled[id(chunk)] for i, chunk in enumerate(chunks) if id(chunk) in pooled}

    def _choose(
        self, hidden: torch.Tensor, batch: Batch, inputs: Sequence[SamplerInput]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all `sampling` chunks, and numbers of those that do not pool; other ranks choose none.

        The numbers [N] are float64: the tokens, then for each row that asks for them its logprobs.
        """
        none = hidden.new_empty(0, dtype=torch.float64)
        if not batch.sampling:
            return none, none
        logits = self._decoder.logits(hidden[batch.last])
        if not inputs or (self._parallel is not None and self._parallel.rank):
            return logits, none
        given = select(logits, [i for i, chunk in enumerate(batch.sampling) if not chunk.pools])
        tokens = sample(given, inputs)
        with_logprobs = [index for index, request in enumerate(inputs) if request.params.logprobs is not None]
        if not with_logprobs:
            return logits, tokens.double()
        logprobs = raw_logprobs(select(given, with_logprobs), select(tokens, with_logprobs))
        return logits, torch.cat([tokens.double(), logprobs.flatten()])

    def _hidden(self, batch: Batch, output: ModelRunnerOutput) -> torch.Tensor:
        """[T, hidden_size], by a graph where one fits the step."""
        if self._graphs is not None:
            size = self._graphs.fit(batch)
            if size is not None:
                output.graphed = True
                return self._graphs.replay(size, batch)
        return self._forward(batch) if self._states is None else self._with_states(self._states, batch)

    def _forward(self, batch: Batch) -> torch.Tensor:
        embeds = self._decoder.embed(batch.token_ids)
        self.kv_cache.watch(len(batch.token_ids))
        return self._decoder.forward(embeds, batch.positions, batch.merged, batch.attention, **batch.inputs)

    def _with_states(self, pool: StatePool, batch: Batch) -> torch.Tensor:
        """[T, hidden_size], group by group: recurrent layers take one sequence, or one token of each."""
        groups = groups_of(batch.chunks, in_pieces=self._decoder.geometry.keeps_inside)
        parts, finite = [], []
        for chunks in groups:
            part = batch if len(groups) == 1 else self._builder.build(chunks, self.encoder_cache)
            part.attention.states = states = pool.begin(chunks)
            parts.append(self._forward(part))
            pool.end(chunks, states)
            finite.append(self.kv_cache.finite)
        self.kv_cache.finite = None if finite[0] is None else torch.cat([x for x in finite if x is not None])
        return torch.cat(parts)

    def _forget(
        self, non_finite: Sequence[int], ordered: Sequence[ScheduledChunk], batch: Batch, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Clears these chunks in the KV cache, and in `hidden`, from which all are sampled."""
        slots = torch.split(batch.attention.slots, [chunk.count for chunk in ordered])
        for index in non_finite:
            request = ordered[index].state.request
            logger.warning(
                "request %s: the model's output is NaN or infinity: try a wider --dtype",
                request.name,
                extra=request.log_extra,
            )
            self.kv_cache.clear(slots[index])
        return hidden.nan_to_num(0.0, 0.0, 0.0)


def sampler_input(chunk: ScheduledChunk) -> SamplerInput:
    request = chunk.state.request
    params, output = request.sampling, request.output_token_ids
    return SamplerInput(
        params,
        output,
        len(output),
        params.eos_token_ids,
        request.distinct_prompt_ids if params.reads_prompt else (),
        request.grammar.allowed(output) if request.grammar is not None else None,
        request.logits_rules,
        request.prompt_token_ids,
    )


def _scores(sampling: Sequence[ScheduledChunk], logits: torch.Tensor) -> dict[int, bytes]:
    """The scores of the chunks that pool, by `id`."""
    return {
        id(chunk): score(row, chunk.state.request.pooling)
        for chunk, row in zip(sampling, logits, strict=True)
        if chunk.pools and chunk.state.request.pooling is not None
    }


def _add_tokens(
    output: ModelRunnerOutput,
    chunks: Sequence[ScheduledChunk],
    sampling: Sequence[ScheduledChunk],
    numbers: Sequence[float],
    inputs: Sequence[SamplerInput],
) -> None:
    """Writes tokens and logprobs, by the places of their chunks in the step; 0 for those without a token."""
    place = {id(chunk): index for index, chunk in enumerate(c for c in chunks if c.samples)}
    output.sampled = [0] * len(place)
    given = [chunk for chunk in sampling if not chunk.pools]
    places = [place[id(chunk)] for chunk in given]
    tokens, logprobs = [int(number) for number in numbers[: len(given)]], numbers[len(given) :]
    for at, token in zip(places, tokens, strict=True):
        output.sampled[at] = max(0, token)
    with_logprobs = [index for index, request in enumerate(inputs) if request.params.logprobs is not None]
    for row, index in enumerate(with_logprobs):
        width = len(logprobs) // len(with_logprobs)
        part = logprobs[row * width : (row + 1) * width]
        output.logprobs[places[index]] = read_logprobs(
            part, tokens[index], inputs[index].params.logprobs or 0
        )
    _add_errors(output, given, tokens, places)


def _add_errors(
    output: ModelRunnerOutput, chunks: Sequence[ScheduledChunk], tokens: Sequence[int], places: Sequence[int]
) -> None:
    for place, chunk, token in zip(places, chunks, tokens, strict=True):
        grammar = chunk.state.request.grammar
        if grammar is not None and grammar.error is not None:
            output.errors[place] = grammar.error
        elif token < 0:
            request = chunk.state.request
            logger.warning("request %s: its logits leave no token", request.name, extra=request.log_extra)
            output.errors[place] = InternalError(
                "the model's logits for this request are NaN, infinite or all masked: no token can be chosen"
            )


def all_finite(hidden: torch.Tensor, written: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [1], 1 where `hidden` [T, hidden] and what was `written` have no NaN or infinity."""
    finite = hidden.sum(dtype=torch.float32).isfinite()
    return (finite if written is None else finite & written.all()).double()[None]


def non_finite_chunks(
    hidden: torch.Tensor, counts: Sequence[int], written: torch.Tensor | None = None
) -> list[int]:
    """Indices of the chunks, of `counts` tokens each, with NaN or infinity in `hidden` [T, hidden].

    None of it may stay in the KV cache: attention multiplies masked values by zero, and zero times NaN is
    NaN. A value that is not finite shows in the row of its own token, which attends to itself; a key need
    not, since a score of -inf is ignored. `written` [T], where keys may overflow, says which were finite.
    """
    finite = hidden.isfinite().all(-1)
    if written is not None:
        finite &= written
    return [index for index, part in enumerate(torch.split(finite, list(counts))) if not part.all()]


def check_projection(key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ArithmeticError for cross keys or values that are NaN or infinity."""
    if not (key.isfinite().all() and value.isfinite().all()):
        raise ArithmeticError("an encoder output's keys and values overflow: give a wider --dtype")
