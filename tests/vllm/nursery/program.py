"""vLLM servers by fork from one process that has imported vLLM, which is nine tenths of a small engine's start.

`python program.py serve SOCKET` imports and listens. `python program.py start SOCKET MODULE ARGS...`
takes the place of `python -m MODULE ARGS...`: it has the other one fork, with its own arguments, environment, folder
and output. It passes SIGTERM and SIGINT on and ends as the fork does; however it ends itself, the fork and its children
end with it.

Run by vLLM's Python, and so without anything of PPD.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

IMPORTED = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
NUMBER = struct.Struct("!i")  # a message's length; an exit code, negative for a signal


def serve(path: str) -> int:
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who tend the engines
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen()
        Path(path + ".new").rename(path)  # there is no file until it listens
        while True:
            asker, _ = listener.accept()
            with asker:
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    tend(asker)
                    return 0


def tend(asker: socket.socket) -> None:
    """Forks the engine and waits for it; returns in the engine's process only, once that has run."""
    size, outputs, _, _ = socket.recv_fds(asker, NUMBER.size, 3)
    (length,) = NUMBER.unpack(size)
    task = json.loads(asker.recv(length, socket.MSG_WAITALL))
    engine = os.fork()
    if engine == 0:
        asker.close()
        become(task, outputs)
        return
    with contextlib.suppress(OSError):
        os.setpgid(engine, engine)  # as the engine does itself: whoever is first
    ended = os.pidfd_open(engine)
    while ended not in select.select([asker.fileno(), ended], [], [])[0]:
        orders = asker.recv(1)
        os.killpg(engine, signal.SIGKILL) if not orders else os.kill(engine, orders[0])
    _, status = os.waitpid(engine, 0)
    with contextlib.suppress(OSError):
        asker.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def become(task: dict[str, Any], outputs: list[int]) -> None:
    os.setpgid(0, 0)
    for number, output in enumerate(outputs):
        os.dup2(output, number)
        os.close(output)
    os.chdir(task["folder"])
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.path[:0] = filter(None, task["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = task["arguments"]
    runpy.run_module(task["module"], run_name="__main__", alter_sys=True)


def start(path: str, module: str, *arguments: str) -> int:
    task = {"module": module, "arguments": arguments, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    message = json.dumps(task).encode()
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(path)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda order, _: nursery.send(bytes((order,))))
        socket.send_fds(nursery, [NUMBER.pack(len(message))], [0, 1, 2])
        nursery.sendall(message)
        answer = nursery.recv(NUMBER.size)
    code = NUMBER.unpack(answer)[0] if answer else 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    _, what, *rest = sys.argv
    sys.exit(serve(*rest) if what == "serve" else start(*rest))
