"""Runs one step's work on the device: transfers, forward, logits of the last tokens, the next tokens."""

from __future__ import annotations

import logging

import torch

from triptych.ec_connector.base import ECConnectorWorker, EncoderOutput
from triptych.models.base import DecoderSide
from triptych.pd_worker.attention import PagedKVCache
from triptych.pd_worker.batch import Batch, BatchBuilder, in_batch_order
from triptych.pd_worker.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from triptych.pd_worker.sampler import SamplerInput, sample

log = logging.getLogger(__name__)


class ModelRunner:
    """Owns the decoder, the KV cache and the worker's map of embeddings."""

    def __init__(
        self, decoder: DecoderSide, connector: ECConnectorWorker, *, num_blocks: int, block_size: int
    ) -> None:
        geometry = decoder.geometry
        self._decoder = decoder
        self._connector = connector
        self.encoder_cache: dict[str, EncoderOutput] = {}
        self.kv_cache = PagedKVCache(
            num_layers=geometry.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._builder = BatchBuilder(self.kv_cache, geometry.position_rows, decoder.device, decoder.dtype)

    @property
    def position_rows(self) -> int:
        return self._decoder.geometry.position_rows

    @property
    def vocab_size(self) -> int:
        return self._decoder.geometry.vocab_size

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._decoder.module.parameters())

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """One step. A model that cannot run is an `error` in the output; transfers are reported anyway."""
        self._start_transfers(scheduled)
        output = ModelRunnerOutput()
        try:
            if scheduled.chunks:
                output.sampled = self._compute(scheduled.chunks)
        except Exception as error:
            log.exception("step %d failed", scheduled.step)
            output.error = error
        output.ec_connector_output = self._connector.get_finished()
        return output

    def _start_transfers(self, scheduled: SchedulerOutput) -> None:
        for key in scheduled.evicted:
            self.encoder_cache.pop(key, None)
        if scheduled.ec_connector_metadata is not None:
            self._connector.start_load_caches(scheduled.ec_connector_metadata, self.encoder_cache)

    @torch.inference_mode()
    def _compute(self, chunks: list[ScheduledChunk]) -> list[int]:
        """The tokens of the chunks that sample, in the order of `chunks`."""
        batch = self._builder.build(in_batch_order(chunks), self.encoder_cache)
        embeds = self._decoder.embed(batch.token_ids)
        hidden = self._decoder.forward(embeds, batch.positions, batch.merged, batch.attention)
        tokens = self._sample(hidden, batch)
        return [tokens[id(chunk)] for chunk in chunks if chunk.samples]

    def _sample(self, hidden: torch.Tensor, batch: Batch) -> dict[int, int]:
        if not batch.sampling:
            return {}
        logits = self._decoder.logits(hidden[batch.last])
        tokens = sample(logits, [sampler_input(chunk) for chunk in batch.sampling])
        return {id(chunk): token for chunk, token in zip(batch.sampling, tokens, strict=True)}


def sampler_input(chunk: ScheduledChunk) -> SamplerInput:
    request = chunk.state.request
    output = request.output_token_ids
    return SamplerInput(request.sampling, output, len(output), request.sampling.eos_token_ids)
