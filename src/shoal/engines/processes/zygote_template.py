"""The template: a process that imports what almost every run needs, and then forks a zygote for each run.

The process that starts the runs starts it, and sends requests over a socket (`template_process.py`). A zygote gets the
environment, the working folder and the import path that this process has at that time, its end of the pipe to the
agent, and the log of the run. The template reaps a zygote only on request, so that the zygote's id stays reserved. All
its zygotes have the hash seed of the template, and end with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from shoal.engines.operating_system import exit_with_parent, raise_file_limit, release_memory
from shoal.engines.processes import zygote
from shoal.engines.processes.template_process import LENGTH, READY, REPLY
from shoal.experiment.process_state import reseed_generators


def main() -> None:
    exit_with_parent(int(sys.argv[3]))
    raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what a Ctrl-C means
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the system would reap zygotes
    owner = socket.socket(fileno=int(sys.argv[2]))
    owner.setblocking(True)  # it is not if the owner has set a default timeout for sockets
    zygote.preload()
    gc.collect()
    release_memory()
    gc.freeze()  # the collector would write to the memory that zygotes share
    owner.sendall(READY)
    try:
        _serve(owner)
    except ConnectionError:
        return  # the owner has ended


def _serve(owner: socket.socket) -> None:
    """Handle requests until the owner closes the socket."""
    while True:
        # Closed if the code of a node starts a program.
        header, files, *_ = socket.recv_fds(owner, LENGTH.size, 2, socket.MSG_CMSG_CLOEXEC)
        if len(header) < LENGTH.size:
            return
        (length,) = LENGTH.unpack(header)
        request = json.loads(owner.recv(length, socket.MSG_WAITALL))
        if "reap" in request:
            os.waitpid(request["reap"], 0)
        else:
            _fork(owner, request, *files)


def _fork(owner: socket.socket, request: dict[str, Any], pipe: int, log: int) -> None:
    template = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        owner.sendall(REPLY.pack(0))
        pid = -1
    if pid == 0:
        _run_zygote(owner, request, template, pipe, log)
    os.close(pipe)
    os.close(log)


def _run_zygote(owner: socket.socket, request: dict[str, Any], template: int, pipe: int, log: int) -> None:
    """In the child: become the zygote of a run, and exit after it."""
    code = 1
    try:
        try:
            _prepare(request, template, log)
        except Exception:
            owner.sendall(REPLY.pack(0))
            raise
        # Sent only now: the owner may kill the process group, which exists.
        owner.sendall(REPLY.pack(os.getpid()))
        owner.close()
        zygote.serve(Connection(pipe))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(request: dict[str, Any], template: int, log: int) -> None:
    """Take what a new zygote gets from the owner."""
    os.setsid()
    exit_with_parent(template)
    for output in (sys.stdout, sys.stderr):
        os.dup2(log, output.fileno())
    os.close(log)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    reseed_generators()
