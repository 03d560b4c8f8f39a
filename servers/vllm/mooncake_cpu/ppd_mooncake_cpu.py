"""Answers the one question about an accelerator that vLLM's Mooncake connector asks, where there is none.

Its constructor asks PyTorch which device is the current one, only to name it to the library, which over TCP ignores it.
Without an accelerator PyTorch raises, and the engine ends.
"""

from __future__ import annotations

import importlib
from typing import Any


def register() -> None:
    torch: Any = importlib.import_module("torch")
    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
