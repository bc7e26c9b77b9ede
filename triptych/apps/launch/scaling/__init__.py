"""Pools of workers that follow the proxies' scaling decisions."""
