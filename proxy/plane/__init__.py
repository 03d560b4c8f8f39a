"""Bytes moved by compiled code: sockets, with one epoll for all of them."""

from __future__ import annotations

try:
    from .poller import Poller
except ImportError:  # installed without a C compiler, or not on Linux
    Poller = None  # type: ignore[assignment,misc]  # a name for annotations, which nobody may call
    IS_BUILT = False
else:
    IS_BUILT = True

__all__ = ["IS_BUILT", "Poller"]
