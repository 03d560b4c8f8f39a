"""Where a turn is computed, as a pure function of the turn, the fleet's views and the rules.

The live proxy, the simulator in virtual time and the replay of a recorded log call the same `decide`.
"""

from .candidates import Excluded, has_room
from .decide import decide
from .decision import Decision, Limits, Route, Rules, Turn
from .placement import can_stand_in, route_alone

__all__ = [
    "Decision",
    "Excluded",
    "Limits",
    "Route",
    "Rules",
    "Turn",
    "can_stand_in",
    "decide",
    "has_room",
    "route_alone",
]
