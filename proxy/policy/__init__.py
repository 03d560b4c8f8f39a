"""Where a turn is computed, as a pure function of the turn, the fleet's views and the rules.

The live proxy, the simulator in virtual time and the replay of a recorded log call the same `decide`.
"""

from .decide import Excluded, decide, has_room
from .decision import Decision, Route, Rules, Turn

__all__ = ["Decision", "Excluded", "Route", "Rules", "Turn", "decide", "has_room"]
