"""The four dashboards of the chart."""

from __future__ import annotations

from support.monitoring.dashboards.encoder_pool import ENCODER_POOL
from support.monitoring.dashboards.overview import OVERVIEW
from support.monitoring.dashboards.pd_workers import PD_WORKERS
from support.monitoring.dashboards.store import STORE

DASHBOARDS = (OVERVIEW, ENCODER_POOL, PD_WORKERS, STORE)
