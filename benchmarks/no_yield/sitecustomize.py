"""Waits of vLLM's processes without `sched_yield`, for those that have this folder on their path.

They look for each other's messages in a loop of `sched_yield`. On Linux 6.18 each of these calls gives up a
whole turn of the scheduler: a process that has waited so for a second gets no core until all others rest.
"""

import os
import time

_PAUSE = 50e-6

os.sched_yield = lambda: time.sleep(_PAUSE)
