"""What the PPD paper prints: its tables 1, 2 and 4, and the text of its section 4.4."""

from __future__ import annotations

from typing import Final

# Table 1: change of turn-2 TTFT from x=0 to x=1, in percent, at low, medium and high QPS.
GAINS: Final = {
    "1P_3D": (-57.8, -65.2, -73.3),
    "2P_2D": (-47.7, -51.6, -56.2),
    "3P_1D": (-44.3, -38.1, -24.9),
}

# Table 2, and appendix A for the hybrids: points won, in percent, by TTFT, TPOT and throughput.
WINS: Final = {
    "replica": (63.3, 0.6, 0.0),
    "x=0": (0.0, 38.3, 4.4),
    "0<x<1": (3.3, 33.3, 27.8),
    "x=1": (27.2, 15.6, 38.3),
    "hybrid": (6.1, 12.2, 16.1),
}

# Points whose best configuration for TTFT is not the best for TPOT, in percent.
DISAGREEMENT: Final = 92.2

# Table 4: failure rate in percent at these QPS.
FAILURE_QPS: Final = (8.0, 12.0, 16.0, 20.0)
FAILURES: Final = {
    ("3P_1D", 0.0): (11, 44, 61, 89),
    ("3P_1D", 1.0): (6, 22, 44, 67),
    ("2P_2D", 0.0): (0, 6, 11, 22),
    ("2P_2D", 1.0): (0, 0, 6, 11),
    ("4R", None): (0, 0, 0, 0),
}
