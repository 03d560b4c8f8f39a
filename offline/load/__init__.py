"""An open-loop load generator over HTTP: conversations against any OpenAI-compatible endpoint, one record a request."""

from .measure import measure
from .player import Progress
from .target import Api, Target

__all__ = ["Api", "Progress", "Target", "measure"]
