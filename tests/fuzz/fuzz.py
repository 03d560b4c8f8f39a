"""Runs one of the targets in `targets.py` under atheris, for a while or until it finds something.

    python tests/fuzz/fuzz.py relay -max_total_time=3600 corpus/relay

Behind the target come libFuzzer's options and folders with inputs (https://llvm.org/docs/LibFuzzer.html); the first
folder keeps what is found on the way. `test_targets.py` does the same for some seconds. An input that broke a target
is written to a file: give that file's name in place of a folder to see it again.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    import atheris  # type: ignore[import-untyped]

    sys.path.insert(0, str(Path(__file__).parents[2]))
    with atheris.instrument_imports(include=["ppd"]):
        from tests.fuzz.targets import TARGETS
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"the first argument is a target: {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
