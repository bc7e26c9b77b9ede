"""The integration with vLLM: an EC connector that an unmodified vLLM loads by its module path.

    vllm serve MODEL --enable-mm-embeds --ec-transfer-config '{"ec_connector": "TriptychECConnector",
      "ec_connector_module_path": "triptych.integrations.vllm", "ec_role": "ec_consumer",
      "ec_connector_extra_config": {"store": "redis://host:6379/0", "namespace": "..."}}'

vLLM is imported by `connector` and `kv_tier` alone, and only once vLLM asks for their class: every other
module here is plain Python, which the tests run without it. See docs/vllm.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.integrations.vllm.connector import TriptychECConnector
    from triptych.integrations.vllm.kv_tier import TriptychKVTier

__all__ = ["TriptychECConnector", "TriptychKVTier"]


def __getattr__(name: str) -> object:
    """The class; ConfigError where the installed vLLM is not one that it is made for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from triptych.integrations.vllm.options import check_installed

    check_installed()
    if name == "TriptychKVTier":
        from triptych.integrations.vllm.kv_tier import TriptychKVTier

        return TriptychKVTier
    from triptych.integrations.vllm.connector import TriptychECConnector

    return TriptychECConnector
