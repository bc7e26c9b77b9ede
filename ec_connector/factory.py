"""The factory of EC connectors by name; a connector's module is imported when one is first created."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal, overload

from triptych.ec_connector.base import (
    ECConnectorBase,
    ECConnectorRole,
    ECConnectorScheduler,
    ECConnectorWorker,
    ECTransferConfig,
)

_SUFFIXES = {ECConnectorRole.SCHEDULER: "Scheduler", ECConnectorRole.WORKER: "Worker"}


class ECConnectorFactory:
    """The factory of both roles. A connector is `module.path:Name`: classes NameScheduler and NameWorker."""

    _paths: dict[str, str] = {}

    @classmethod
    def register(cls, name: str, path: str) -> None:
        """Registers `module.path:Name` under `name`; ValueError if that is taken."""
        if name in cls._paths:
            raise ValueError(f"connector {name!r} is registered already")
        if ":" not in path:
            raise ValueError(f"connector path {path!r} is not of the form module.path:Name")
        cls._paths[name] = path

    @overload
    @classmethod
    def create_connector(
        cls, config: ECTransferConfig, role: Literal[ECConnectorRole.SCHEDULER]
    ) -> ECConnectorScheduler: ...

    @overload
    @classmethod
    def create_connector(
        cls,
        config: ECTransferConfig,
        role: Literal[ECConnectorRole.WORKER],
        on_progress: Callable[[], None] | None = None,
    ) -> ECConnectorWorker: ...

    @classmethod
    def create_connector(
        cls,
        config: ECTransferConfig,
        role: ECConnectorRole,
        on_progress: Callable[[], None] | None = None,
    ) -> ECConnectorBase:
        """`role` of the connector that `config.connector` names; ValueError if there is none."""
        made = cls._find(config.connector, role)
        options = {"on_progress": on_progress} if role is ECConnectorRole.WORKER else {}
        connector = made(config, **options)
        if connector.role is not role:
            raise ValueError(f"connector {config.connector!r} does not have the role {role.name}")
        return connector

    @classmethod
    def _find(cls, name: str, role: ECConnectorRole) -> Callable[..., ECConnectorBase]:
        path = cls._paths.get(name, name)
        module, _, prefix = path.partition(":")
        if not prefix:
            raise ValueError(f"connector {name!r} is unknown: use one of {', '.join(sorted(cls._paths))}")
        try:
            connector_class: Callable[..., ECConnectorBase] = getattr(
                import_module(module), prefix + _SUFFIXES[role]
            )
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(f"connector {name!r} cannot be loaded: {error}") from error
        return connector_class


ECConnectorFactory.register("redis", "triptych.ec_connector.connectors.redis:RedisConnector")
ECConnectorFactory.register("memory", "triptych.ec_connector.connectors.memory:MemoryConnector")
