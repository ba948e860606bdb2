"""What all kinds of deployment have in common: the experiment with its files, the agents, and their resources."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from shoal.cli.arguments import writing
from shoal.engines.processes.keys import read_pair_file, read_trusted
from shoal.engines.processes.remote.hosted_run import names_of_code
from shoal.engines.processes.remote.launch import check_runs_on_agents
from shoal.engines.processes.remote.shipping import Shipment
from shoal.errors import ExperimentError
from shoal.experiment import Experiment

EXPERIMENT = "experiment.toml"
"""The name of the experiment in a deployment; the files that it names are in numbered folders beside it."""
PORT = 7700
"""The port of the coordinator, where every deployment has its own network."""
WAIT_SECONDS = 600
"""How long an agent waits for a run. The coordinator waits for its agents as long."""
LONGEST_NAME = 40
"""Characters. Names of Kubernetes objects have at most 63, with endings."""
KEYS = "keys"
"""The folder of keys in a deployment, which the user makes."""
COORDINATOR_KEYS = ("coordinator.key_secret", "agent.key")
AGENT_KEYS = ("agent.key_secret", "coordinator.key")


@dataclass(frozen=True)
class Resources:
    """What each agent gets."""

    cpus: int = 4
    memory: str = "8G"
    """A number and a unit of binary multiples: K, M, G or T."""


@dataclass(frozen=True)
class Deployment:
    """An experiment that is ready to run on agents."""

    name: str
    """Lower-case letters, digits and hyphens, as Kubernetes requires."""
    agents: int
    resources: Resources
    files: Mapping[str, bytes]
    """The experiment, and the files that it names, by their paths in the deployment."""
    runs_code: bool = False
    """Whether the experiment names plug-ins, which agents must accept."""
    dataset_path: str | None = None
    """The path of the data set, if the experiment has one."""

    def coordinator_arguments(self, folder: str, keys: str, out: str) -> list[str]:
        """The arguments of `shoal` for the coordinator: where the experiment is, the keys, and the folder of runs."""
        secret, trusted = (f"{keys}/{name}" for name in COORDINATOR_KEYS)
        listen = ["--listen", f"0.0.0.0:{PORT}", "--expect", str(self.agents)]
        return ["run", f"{folder}/{EXPERIMENT}", "--out", out, *listen, "--key", secret, "--trust", trusted]

    def agent_arguments(self, coordinator: str, keys: str) -> list[str]:
        """The arguments of `shoal` for an agent that joins the host `coordinator`."""
        secret, trusted = (f"{keys}/{name}" for name in AGENT_KEYS)
        code = ["--allow-code"] if self.runs_code else []
        join = ["--join", f"{coordinator}:{PORT}", "--wait", str(WAIT_SECONDS)]
        return ["agent", *join, "--cores", str(self.resources.cpus), "--key", secret, "--trust", trusted, *code]


def plan_deployment(experiment: Experiment, agents: int, resources: Resources) -> Deployment:
    """Check that agents can run an experiment, and collect its files. Raises `ShoalError`."""
    if experiment.engine != "processes":
        problem = "agents run processes: add engine = 'processes', or --set 'engine=\"processes\"'"
        raise ExperimentError([problem], experiment.name)
    check_runs_on_agents(experiment)
    if agents > experiment.size:
        warnings.warn(
            f"--agents {agents}: the experiment has {experiment.size} nodes, so {agents - experiment.size} agents get "
            "no nodes and end at once",
            stacklevel=2,
        )
    shipment = Shipment(experiment)
    files = {EXPERIMENT: tomli_w.dumps(shipment.table).encode()}
    files.update({file.name: file.content for file in shipment.files})
    path = shipment.table["dataset"].get("path")
    runs_code = any(names_of_code(shipment.table))
    return Deployment(_object_name(experiment.name), agents, resources, files, runs_code, path)


def check_keys(folder: Path) -> None:
    """Check that a folder has the keys of a coordinator and its agents. Raises `LaunchError`."""
    for secret, public in (COORDINATOR_KEYS, AGENT_KEYS):
        read_pair_file(folder / secret)
        read_trusted([folder / public])


def write_files(folder: Path, files: Mapping[str, bytes], force: bool) -> None:
    """Write a deployment. Without `force`, the folder must be new or empty. Raises `ExperimentError`."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ExperimentError([f"{str(folder)!r} is not a folder; choose another"], "--out")
    with writing(folder):
        if not force and folder.is_dir() and any(folder.iterdir()):
            problem = f"{str(folder)!r} has files, which are not overwritten; choose another folder, or add --force"
            raise ExperimentError([problem], "--out")
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _object_name(name: str) -> str:
    """Return the name of an experiment with only the characters that names of jobs may have."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"shoal-{plain}"[:LONGEST_NAME].rstrip("-")
