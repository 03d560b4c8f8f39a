"""Each request in flight is an open file, of which a process may have a limited number."""

from __future__ import annotations

import resource

_SPARE = 128  # what a Python process has open besides


def allow_connections(wanted: int) -> str:
    """Raises the soft limit as far as need be; says what is missing, or nothing."""
    needed = wanted + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= needed:
        return ""
    return f"{wanted} connections may be needed and {allowed - _SPARE} can be open (ulimit -Hn is {hard})"
