"""Messages of a ZeroMQ socket, read part by part: one of very many parts takes neither memory nor time of the loop.

ZeroMQ itself keeps all parts of a message, and hands none out, until its last one has come.
"""

from __future__ import annotations

import time

import zmq


class MessageParts:
    """Of one socket. A message whose reading is not ended goes on with the next call."""

    def __init__(self, socket: zmq.Socket[bytes], most: int) -> None:
        """most: parts that a message may have. Of one with more, one more than that is kept, to be refused by."""
        self._socket = socket
        self._most = most
        self._kept: list[zmq.Frame] = []

    def next(self, until_s: float) -> list[zmq.Frame] | None:
        """The parts of one message; None: none is there, or there was no time to read all of it.

        until_s: by `time.perf_counter`, when to leave the rest of a message that is too long.
        """
        while True:
            try:
                part = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if len(self._kept) <= self._most:
                self._kept.append(part)
            if not part.more:
                kept, self._kept = self._kept, []
                return kept
            if len(self._kept) > self._most and time.perf_counter() >= until_s:
                return None
