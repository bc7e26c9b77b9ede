"""NIXL's progress thread beside an engine that computes on the CPU: it waits for events.

NIXL's Python API makes agents whose thread looks without a pause, so that each vLLM with a NixlConnector
takes a core, idle or not. Beside a GPU that buys microseconds; on a CPU it is the core, or half of it, that
the engine computes on.
"""

from __future__ import annotations

from typing import Any

#: vLLM's connectors that make an agent of NIXL.
CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
#: Microseconds after which the thread looks where no event has come.
PAUSE = 1000


def makes_agents(kv_transfer_config: Any) -> bool:
    """Whether a vLLM with this configuration, or None, transfers KV by NIXL."""
    return kv_transfer_config is not None and any(map(kv_transfer_config.has_connector, CONNECTORS))


def let_wait(bindings: Any) -> None:
    """Has the agents that this process makes from now on wait for events. `bindings`: NIXL's compiled module.

    Its configuration has the pause; only the Python class between it and vLLM names none, and sets 0.
    """
    create = bindings.nixlAgent
    if getattr(create, "waits", False):
        return

    def waiting(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE
        return create(name, config)

    waiting.waits = True  # type: ignore[attr-defined]
    bindings.nixlAgent = waiting
