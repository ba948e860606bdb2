"""Attacks of another user of the same machine on a run whose links are not sealed.

The attacker knows the program and sees all open ports. It does not know the secret of the run.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from process_runs import NODES, ROUNDS, listens_on, run, started
from shoal.engines.processes.shaper import Registration, Submission, encode, identity
from shoal.message import RUN_LENGTH, Message, Payload, address

pytestmark = [
    pytest.mark.usefixtures("no_process_is_left"),
    pytest.mark.skipif(os.geteuid() != 0, reason="to act as another user needs root"),
]
OTHER_USER = 65534
SHAPED = "network={name='uniform', latency=0.001}"


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can enter, as a home folder often is; pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="other-user-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_another_user(attack: Callable[[], None]) -> None:
    """Run `attack` in a process of another user, and wait for its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            attack()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def readable_words(folder: Path) -> set[str]:
    """All words of the length of a run's secret in files below `folder` that this user can read."""
    words: set[str] = set()
    for path in folder.rglob("*"):
        with suppress(OSError):
            text = path.read_text(errors="replace")
            words |= {word for word in text.replace("'", " ").replace('"', " ").split() if len(word) == RUN_LENGTH}
    return words


def connect(context: zmq.Context[Any], kind: int, port: int, name: bytes | None = None) -> zmq.Socket[Any]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 10_000)
    if name is not None:
        socket.setsockopt(zmq.IDENTITY, name)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def test_nan_models_of_another_user_are_not_merged(public_folder: Path, tmp_path: Path) -> None:
    _, _, undisturbed = run(tmp_path / "undisturbed")
    with started(public_folder, held=1) as going:
        going.wait_for_round(0)
        ports = [listens_on(node) for node in going.nodes]
        parameters = np.load(undisturbed.folder.model(0)).size

        def attack() -> None:
            context: zmq.Context[Any] = zmq.Context()
            lines = [connect(context, zmq.PUSH, port) for port in ports]
            nan = Payload({"params": np.full(parameters, np.nan, np.float32)})
            for _ in range(2):  # the second time with what the rejections of the first time reveal
                for name in {"0" * RUN_LENGTH, "", *readable_words(public_folder)}:
                    for to, line in enumerate(lines):
                        for sender in set(range(NODES)) - {to}:
                            for round in range(1, ROUNDS):
                                frames = Message(sender, "model", round, nan, name).frames()
                                line.send_multipart([address(to), *frames])
                time.sleep(1.0)
            context.destroy(linger=10_000)

        as_another_user(attack)
        going.release()
        code, out = going.end()
        assert code == 0, out
        assert going.summary["digest"] == undisturbed.summary["digest"]
        assert going.summary["messages_rejected"] >= 2 * 2 * NODES * (NODES - 1) * (ROUNDS - 1)


def test_another_user_cannot_take_over_an_identity_at_the_network_process(public_folder: Path, tmp_path: Path) -> None:
    _, _, undisturbed = run(tmp_path / "undisturbed", SHAPED)
    with started(public_folder, SHAPED, held=1) as going:
        going.wait_for_round(0)
        port = listens_on(going.network_process)

        def attack() -> None:
            context: zmq.Context[Any] = zmq.Context()
            for name in ("0" * RUN_LENGTH, "", *readable_words(public_folder)):
                for node in range(NODES):
                    for claimed in (identity(node, name), b"n%d" % node):
                        line = connect(context, zmq.DEALER, port, claimed)
                        line.send(encode(Registration(time.monotonic())))
                        line.send(encode(Submission(7, (node + 1) % NODES, 10**9, time.monotonic(), True)))
                        assert not line.poll(20), "no report reaches the attacker"
            context.destroy(linger=10_000)

        as_another_user(attack)
        going.release()
        code, out = going.end()
        assert code == 0, out
        assert going.summary["digest"] == undisturbed.summary["digest"]
        assert not going.summary["events"].get("timed out"), "no message was delayed or lost"
