"""The program of the ranks 1..R-1 of a PD worker: rank 0's steps on their own shares, without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triptych.base.config import PDConfig
from triptych.base.config.flags import config_from
from triptych.base.cpu.threads import in_short_lived_thread
from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device
from triptych.base.ranks.channel import Message
from triptych.base.ranks.rank import Rank
from triptych.ec_connector.base import DirectTransfer, ECConnectorRole, ECTransferConfig
from triptych.models.base import DecoderSide
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.registry import before_each_layer
from triptych.pd_worker.ranks.decoder_ranks import ProgressWriter
from triptych.pd_worker.ranks.request_mirror import RequestMirror
from triptych.pd_worker.ranks.share import load_share, sized
from triptych.pd_worker.ranks.step_message import report_of
from triptych.pd_worker.runner.capacity import runner_options, uses_graphs
from triptych.pd_worker.runner.graph_start import capture_decode_graphs
from triptych.pd_worker.runner.model_runner import ModelRunner


class StepFailed(BaseException):
    """A rank failed in what all ranks do together: its process ends, and with it the worker.

    A BaseException, so that it is no reply: rank 0 may be waiting for this rank in a collective.
    """


def main(rank: Rank) -> None:
    """Loads this rank's share of the decoder, then does what rank 0 says. `config` is a rank's already."""
    config = config_from(PDConfig, rank.config)
    with rank.slow():
        decoder = in_short_lived_thread(load_share, config, rank.rank)
    before_each_layer(decoder.module, rank.tick)
    program = PDRankProgram(rank, config, decoder)
    rank.serve(program.handle)


class PDRankProgram:
    """The commands of rank 0: join, size, build, then steps."""

    def __init__(self, rank: Rank, config: PDConfig, decoder: DecoderSide) -> None:
        self._rank = rank
        self._config = config
        self._decoder = decoder
        Device.of(decoder.device).select()
        self._runner: ModelRunner | None = None
        self._warm = False
        self._mirror = RequestMirror(decoder.geometry.position_rows)

    def handle(self, command: Message, descriptors: Sequence[int]) -> Message:
        """The reply to a command. ConfigError is one; StepFailed for whatever else goes wrong."""
        try:
            match command["kind"]:
                case "join":
                    self._rank.join(self._decoder.device, seconds=command["seconds"])
                    return {}
                case "size":
                    return self._size(command["other_peak"])
                case "build":
                    return self._build(command, descriptors)
                case "step":
                    return self._step(command)
            raise ValueError(f"no such command: {command['kind']}")
        except ConfigError:
            raise
        except Exception as error:
            raise StepFailed(f"{command.get('kind')} failed: {error}") from error

    def _size(self, other_peak: int) -> Message:
        with self._rank.slow():
            config = sized(self._config, self._decoder, other_peak)
        return {"kv_memory": config.kv_memory, "encoder_cache_memory": config.encoder_cache_memory}

    def _build(self, command: Message, descriptors: Sequence[int]) -> Message:
        config = replace(
            self._config,
            kv_memory=command["kv_memory"],
            encoder_cache_memory=command["encoder_cache_memory"],
        )
        decoder = self._decoder
        self._runner = in_short_lived_thread(
            ModelRunner,
            decoder,
            **runner_options(config, decoder),
            parallel=TensorParallel(self._rank.rank, self._rank.size),
        )
        if uses_graphs(config, decoder.device):
            in_short_lived_thread(capture_decode_graphs, config, decoder, self._runner)
        transfer: dict[str, Any] = {**command["transfer"], "device": str(decoder.device)}
        transfer["direct"] = DirectTransfer.of(config)
        progress = ProgressWriter(descriptors[0])
        self._runner.ensure_ec_transfer_initialized(
            ECTransferConfig(**transfer), ECConnectorRole.WORKER, progress.write
        )
        return {}

    def _step(self, command: Message) -> Message:
        assert self._runner is not None, "built before the first step"
        scheduled = self._mirror.apply(command)
        if self._warm or not scheduled.computes:
            output = self._runner.execute(scheduled)
        else:
            with self._rank.slow():
                output = self._runner.execute(scheduled)
            self._warm = True
        if output.error is not None:
            raise output.error
        return report_of(scheduled.step, output)
