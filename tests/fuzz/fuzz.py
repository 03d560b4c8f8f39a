"""Runs one of the targets in `targets.py` under atheris, for a while or until it finds something.

    python tests/fuzz/fuzz.py relay -max_total_time=3600 corpus/relay

Behind the target come libFuzzer's options and folders with inputs (https://llvm.org/docs/LibFuzzer.html); the first
folder keeps what is found on the way. `test_targets.py` does the same for some seconds. An input that broke a target
is written to a file: give that file's name in place of a folder to see it again.

With `-` for a target, lines of stdin say what to run, one after another: a JSON list of a log file, seconds after which
it is ended, and the arguments. Each gets a process with everything imported already, and a line with its exit code.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    import atheris  # type: ignore[import-untyped]

    sys.path.insert(0, str(Path(__file__).parents[2]))
    with atheris.instrument_imports(include=["ppd"]):
        from tests.fuzz.targets import TARGETS

    def fuzz(name: str, *options: str) -> None:
        if name not in TARGETS:
            sys.exit(f"the first argument is a target: {', '.join(TARGETS)}")
        atheris.Setup([sys.argv[0], *options], TARGETS[name])
        atheris.Fuzz()

    if sys.argv[1:] == ["-"]:
        serve(fuzz)
    else:
        fuzz(*(sys.argv[1:] or [""]))


def serve(fuzz: Callable[..., None]) -> None:
    for line in sys.stdin:
        log, limit_s, *arguments = json.loads(line)
        process = multiprocessing.get_context("fork").Process(target=run, args=(fuzz, log, arguments))
        process.start()
        process.join(limit_s)
        process.kill()
        process.join()
        print(process.exitcode, flush=True)


def run(fuzz: Callable[..., None], log: str, arguments: list[str]) -> None:
    with Path(log).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    fuzz(*arguments)


if __name__ == "__main__":
    main()
