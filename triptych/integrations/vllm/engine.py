"""What the connector must know of the engine that loads it, read from vLLM's configuration."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from typing import Any

from triptych.base.errors import ConfigError
from triptych.base.vllm_classes import class_of

#: Executors whose worker runs in the scheduler's process.
_IN_PROCESS = ("uni", "external_launcher")


def check_engine(
    vllm_config: Any,
    *,
    is_consumer: bool,
    is_producer: bool = False,
    trusts_clients: bool = False,
    generic: bool = False,
) -> None:
    """ConfigError for an engine in which the connector cannot work, or should not.

    `trusts_clients`: somebody has said that its clients may choose the keys that it saves under. `generic`: a
    class that is not in the table is tried.
    """
    if is_producer and not trusts_clients:
        # What is saved has an identifier of 64 hex digits, which is a client's `uuid` where it gives one.
        raise ConfigError(
            "TriptychECConnector: an ec_producer or ec_both saves under the mm_hash that a client gives as "
            "uuid, so that any client of its API can replace what another tenant's picture means: set "
            "trusted_front_door to true in ec_connector_extra_config where only trusted clients reach it"
        )
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if model.is_encoder_decoder:
        raise ConfigError(
            "TriptychECConnector: vLLM loads no encoder outputs for encoder-decoder models; serve this model "
            "by `triptych pd`"
        )
    architecture = (model.hf_config.architectures or [model.hf_config.model_type])[0]
    if not class_of(architecture, generic=generic).saved_by_vllm and is_producer:
        raise ConfigError(
            f"TriptychECConnector: what vLLM saves of {architecture} could not be used by PD workers: set "
            "ec_role to ec_consumer, and have `triptych encoder` encode"
        )
    if is_consumer and (parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray"):
        raise ConfigError(
            "TriptychECConnector: an ec_consumer's workers read embeddings from memory of the scheduler's "
            "machine: run one vLLM instance per machine, with --distributed-executor-backend mp or uni"
        )
    multimodal = model.multimodal_config
    if is_consumer and multimodal is not None and multimodal.mm_processor_cache_type == "shm":
        raise ConfigError(
            "TriptychECConnector: with the shm processor cache a request does not show whether it carries "
            "its media: use --mm-processor-cache-type lru"
        )


def shares_a_process(vllm_config: Any) -> bool:
    """Whether scheduler and worker are one process."""
    parallel = vllm_config.parallel_config
    return parallel.world_size == 1 and parallel.distributed_executor_backend in (*_IN_PROCESS, None)


def row_width(vllm_config: Any) -> int:
    """Elements of one row of the encoder output: the decoder's width, and again for each deepstack level."""
    model = vllm_config.model_config
    vision = getattr(model.hf_config, "vision_config", None)
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return int(model.get_inputs_embeds_size()) * (1 + levels)


def adopt_logging(ours: logging.Logger, theirs: logging.Logger) -> None:
    """Has vLLM's handlers write our records too: vLLM configures only its own loggers."""
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False


logger = logging.getLogger(__name__)

#: The exit code of an engine whose parent has gone.
_EXIT = 1


def end_with_parent() -> None:
    """From now on ends this process as soon as its parent has ended. For processes of multiprocessing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="parent", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    logger.critical("the process that started this engine has ended: it ends, too")
    # Its own workers end with it: vLLM has them watch this process.
    os._exit(_EXIT)
