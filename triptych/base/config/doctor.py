"""The flags of `triptych doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.config.cluster import ServeConfig
from triptych.base.config.flags import flag


@dataclass(frozen=True, slots=True)
class DoctorConfig(ServeConfig):
    """Those of `triptych serve`, to be checked, and the address of a running cluster."""

    url: str = flag("", "a running cluster to ask, like http://10.0.0.5:8000; its ports are then not tried")
