"""Which agents run an experiment: from the command line, or from a file such as agents.toml.

key   = "keys/coordinator.key_secret"     # this coordinator's key pair
trust = ["keys/agent.key"]                # the public keys of agents

listen = "0.0.0.0:7700"                   # agents may join here …
expect = 2                                # … and so many of them must

[[agent]]
name    = "a"                             # the name in mappings; default: the name that the agent has
address = "10.0.0.2:7700"                 # it listens there
key     = "keys/a.key"                    # its public key; default: the first key of `trust`
ssh     = "user@10.0.0.2"                 # start it over ssh; default: it is started by hand
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

from shoal import schema
from shoal.engines.processes.keys import read_pair_file, read_trusted
from shoal.engines.processes.remote.channel import Address, Trust
from shoal.errors import ExperimentError, LaunchError
from shoal.types import Bounds

REACH_SECONDS = 30.0
"""How long to try to reach an agent that listens."""


@dataclass(frozen=True)
class AgentEntry:
    """An agent that listens."""

    address: str
    name: str | None = None
    key: Path | None = None
    ssh: str | None = None
    command: str = "shoal"
    """The command `shoal` on the machine of an agent that is started over ssh."""
    allow_code: bool = False
    """Whether an agent that is started over ssh accepts source files of plug-ins."""


@dataclass(frozen=True)
class AgentsFile:
    """The tables of agents.toml."""

    agent: tuple[AgentEntry, ...] = ()
    key: Path | None = None
    trust: tuple[Path, ...] = ()
    listen: str | None = None
    announce: str | None = None
    """The address at which agents reach the relay of this machine, if `listen` has none."""
    expect: Annotated[int, Bounds(at_least=1)] | None = None
    wait: Annotated[float, Bounds(above=0)] = 600.0
    """Seconds to wait for agents that join."""
    answer_timeout: Annotated[float, Bounds(above=0)] = 20.0
    """Seconds in which every agent must answer a heartbeat before the run starts."""


@dataclass(frozen=True)
class ListedAgent:
    """An agent that listens at an address."""

    address: Address
    name: str | None = None
    key: bytes | None = None
    ssh: str | None = None
    command: str = "shoal"
    allow_code: bool = False


class StartedAgents(Protocol):
    """Agents that this coordinator has started."""

    def check(self) -> None:
        """Raise `LaunchError` if an agent has ended. Called until the run begins."""
        ...

    def close(self) -> None:
        """Wait until the agents have ended, or end them. The coordinator has closed its sessions before."""
        ...


class AgentStarter(StartedAgents, Protocol):
    """Starts the agents that join."""

    def start(self, join: Address) -> None:
        """Have the agents join the coordinator, which listens at this address."""
        ...


@dataclass(frozen=True)
class AgentsPlan:
    """Which agents run an experiment, and how to reach them."""

    agents: tuple[ListedAgent, ...] = ()
    listen: Address | None = None
    expect: int = 0
    """How many agents must join."""
    wait: float = 600.0
    answer_timeout: float = 20.0
    announce: str | None = None
    """The address at which other machines reach the relay of the coordinator; None: `listen`."""
    trust: Trust = field(default_factory=Trust)
    starter: AgentStarter | None = None
    """Starts the agents that join; None: the user does."""

    @property
    def stays_on_loopback(self) -> bool:
        """Whether all agents are on this machine."""
        addresses = [agent.address for agent in self.agents] + ([] if self.listen is None else [self.listen])
        return all(address.is_loopback for address in addresses)


def read_plan(
    agents: str | None, listen: str | None, expect: int | None, key: Path | None, trust: list[Path]
) -> AgentsPlan | None:
    """Return the plan that the options of `shoal run` describe; None without any of them. Raises `ShoalError`."""
    if agents is None and listen is None:
        if expect is not None or key is not None or trust:
            raise ExperimentError(["--expect, --key and --trust need --agents or --listen"], "shoal run")
        return None
    given = _from_option(agents) if agents is not None else AgentsFile()
    given = replace(
        given,
        key=key or given.key,
        trust=(*given.trust, *trust),
        listen=listen or given.listen,
        expect=expect or given.expect,
    )
    return _checked(given)


def _from_option(text: str) -> AgentsFile:
    if text.endswith(".toml"):
        return _read_file(Path(text))
    return AgentsFile(tuple(AgentEntry(part) for part in text.split(",")))


def _read_file(path: Path) -> AgentsFile:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise ExperimentError([f"{str(path)!r} cannot be read: {error.strerror}"], str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError([f"not valid TOML: {error}"], str(path)) from None
    problems: list[str] = []
    file = schema.convert(table, AgentsFile, "agents", problems)
    if problems:
        raise ExperimentError(problems, str(path))
    assert isinstance(file, AgentsFile)
    base = path.parent
    return replace(
        file,
        key=None if file.key is None else base / file.key,
        trust=tuple(base / trusted for trusted in file.trust),
        agent=tuple(replace(a, key=None if a.key is None else base / a.key) for a in file.agent),
    )


def _checked(file: AgentsFile) -> AgentsPlan:
    if not file.agent and file.listen is None:
        raise LaunchError("no agents: name their addresses, or an address where they can join with 'listen'")
    if (file.listen is None) != (file.expect is None):
        raise LaunchError("'listen' and 'expect' belong together: where agents join, and how many of them")
    own = read_trusted([*file.trust, *(entry.key for entry in file.agent if entry.key is not None)])
    trust = Trust(None if file.key is None else read_pair_file(file.key), own)
    listed = []
    for entry in file.agent:
        address = Address.parse(entry.address)
        if entry.ssh is None:
            trust.require(address, "coordinator", "agent")
        key = read_trusted([entry.key]).popitem()[1] if entry.key is not None else next(iter(own.values()), None)
        listed.append(ListedAgent(address, entry.name, key, entry.ssh, entry.command, entry.allow_code))
    listen = None if file.listen is None else Address.parse(file.listen)
    if listen is not None:
        trust.require(listen, "coordinator", "agent")
    return AgentsPlan(tuple(listed), listen, file.expect or 0, file.wait, file.answer_timeout, file.announce, trust)
