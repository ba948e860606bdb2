"""Agents that the coordinator starts over ssh. Their keys travel over the standard input of the command."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
from typing import IO

import msgspec

from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.remote.agents_plan import ListedAgent
from shoal.errors import LaunchError

EXIT_SECONDS = 10.0
"""How long an agent may take to exit after its run."""


class GivenKeys(msgspec.Struct, frozen=True):
    """The keys of an agent that is started over ssh, on its standard input."""

    public: str
    secret: str
    coordinator: str
    """The public key of the coordinator."""


class SshAgent:
    """The command that runs an agent on another machine."""

    def __init__(self, listed: ListedAgent, pair: KeyPair, coordinator: bytes) -> None:
        """`pair` is the key pair of the agent, `coordinator` the public key that it trusts."""
        assert listed.ssh is not None
        self._target = listed.ssh
        arguments = [
            listed.command,
            "agent",
            "--listen",
            str(listed.address),
            "--keys-from-stdin",
            "--once",
            "--wait",
            "120",
        ]
        arguments += ["--name", listed.name] if listed.name is not None else []
        arguments += ["--allow-code"] if listed.allow_code else []
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        try:
            self._process = subprocess.Popen(
                ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", listed.ssh, shlex.join(arguments)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the coordinator alone
            )
        except FileNotFoundError:
            raise LaunchError("agents.toml: 'ssh' is not installed on this machine") from None
        keys = GivenKeys(pair.public.decode(), pair.secret.decode(), coordinator.decode())
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(keys) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has failed, which `check` reports

    def check(self) -> None:
        """Raise `LaunchError` if the command has ended."""
        if (code := self._process.poll()) is not None:
            self._output.seek(0)
            printed = self._output.read().decode(errors="replace").strip().splitlines()
            reason = printed[-1] if printed else f"exit code {code}"
            raise LaunchError(
                f"agents.toml: 'ssh {self._target}' could not start an agent: {reason}; check that 'ssh {self._target} "
                "shoal doctor' works without a password, or set 'command' to the path of shoal there"
            )

    def close(self) -> None:
        """End the agent: it ends when its standard input does, also if this process is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._output.close()
