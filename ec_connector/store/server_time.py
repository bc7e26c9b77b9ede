"""The first lines of every script that deals in deadlines."""

from __future__ import annotations

#: Milliseconds of the server's clock, as `now`: clocks of workers differ, so deadlines are compared here.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
