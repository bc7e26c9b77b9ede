"""The start of vLLM's AsyncLLM, for a thread: imports, configuration, and the engine's process."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from triptych.errors import ConfigError
from triptych.pd_worker.vllm.in_process.async_client import AsyncLLMClient
from triptych.pd_worker.vllm.in_process.step_log import StepLog
from triptych.types import JsonObject

_MOST_CHARS = 600


def engine_config(arguments: JsonObject) -> Any:
    """vLLM's configuration. ConfigError, with vLLM's own reason, for what it does not take."""
    unknown = sorted(arguments.keys() - AsyncEngineArgs.__dataclass_fields__.keys())
    if unknown:
        raise ConfigError(f"--engine-args: vLLM has no argument {unknown[0]!r}; see `vllm serve --help`")
    try:
        return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValidationError as error:
        reasons = "; ".join(each["msg"] for each in error.errors())
        raise ConfigError(_refused(reasons)) from error
    except (ValueError, TypeError, NotImplementedError, AssertionError, OSError) as error:
        raise ConfigError(_refused(str(error) or type(error).__name__)) from error


def start_engine(vllm_config: Any) -> AsyncLLMClient:
    """The engine, once it can serve. ConfigError where its process ends before."""
    log = StepLog()

    class Logger(StatLoggerBase):  # type: ignore[misc]
        """Hands every step to `log`."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            log.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    try:
        llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[Logger], disable_log_stats=True)
    except Exception as error:
        raise ConfigError(
            f"vLLM did not start ({_short(str(error) or type(error).__name__)}): its log above says why"
        ) from error
    return AsyncLLMClient(llm, log)


def _refused(reason: str) -> str:
    return f"vLLM refuses its configuration, from this worker's flags and --engine-args: {_short(reason)}"


def _short(text: str) -> str:
    return " ".join(text.split())[:_MOST_CHARS]
