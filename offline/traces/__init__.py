"""Recorded conversations and traces, whatever their format, read into one value: who says how much, and when.

Readers take files as they are published, gzipped or not. A row that is malformed is an error that names the file and
the line.
"""

from .formats import Format, arrival_times, detect, read
from .turns import Blocks, Message, TracedConversation, TracedTurn

__all__ = ["Blocks", "Format", "Message", "TracedConversation", "TracedTurn", "arrival_times", "detect", "read"]
