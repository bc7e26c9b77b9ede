"""Events of requests back to the proxies."""
