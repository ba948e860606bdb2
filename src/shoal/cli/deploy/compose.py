"""A file for Docker Compose: a coordinator and a number of equal agents on one network."""

from __future__ import annotations

import os
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cli.deploy.deployment import AGENT_KEYS, COORDINATOR_KEYS, EXPERIMENT, KEYS, Deployment
from shoal.cli.deploy.yaml_files import to_yaml

FILE = "compose.yaml"
EXPERIMENT_FOLDER, KEYS_FOLDER, RUNS_FOLDER, DATA_FOLDER = "/experiment", "/run/secrets", "/runs", "/data"


@dataclass(frozen=True)
class ComposeOptions:
    """What the containers use."""

    image: str = "shoal:latest"
    data: Path | None = None
    """A folder with data sets on the machine."""
    keys: Path | None = None
    """A folder of keys; None: `keys` beside the file."""


def compose_files(deployment: Deployment, options: ComposeOptions) -> dict[str, bytes]:
    """Return the files of a deployment with Docker Compose."""
    if os.geteuid() == 0:
        warnings.warn(
            "the containers run as the user who writes these files, because the keys belong to that user: root; "
            "set SHOAL_USER to another user id, who owns the keys",
            stacklevel=2,
        )
    secrets = options.keys.resolve() if options.keys is not None else Path(KEYS)
    names = sorted({*COORDINATOR_KEYS, *AGENT_KEYS})
    prefix = "" if secrets.is_absolute() else "./"
    table = {
        "name": deployment.name,
        "services": {"coordinator": _coordinator(deployment, options), "agent": _agent(deployment, options)},
        "networks": {"shoal": {}},
        "volumes": {"runs": {}},
        "secrets": {name: {"file": _escaped(f"{prefix}{secrets / name}")} for name in names},
    }
    return {FILE: to_yaml([table]), **deployment.files}


def compose_steps(folder: Path, options: ComposeOptions) -> list[str]:
    """Return the commands that start a deployment."""
    make = [] if options.keys is not None else [f"shoal keys make {KEYS} --name coordinator --name agent"]
    start = "docker compose up --exit-code-from coordinator"
    return [f"cd {shlex.quote(str(folder))}", *make, start, "docker compose cp coordinator:/runs runs"]


def _coordinator(deployment: Deployment, options: ComposeOptions) -> dict[str, Any]:
    service = _service(options, deployment.coordinator_arguments(EXPERIMENT_FOLDER, KEYS_FOLDER, RUNS_FOLDER))
    folders = sorted({Path(name).parts[0] for name in deployment.files} - {EXPERIMENT})
    mounts = [_mount(f"./{name}", f"{EXPERIMENT_FOLDER}/{name}") for name in [EXPERIMENT, *folders]]
    runs = {"type": "volume", "source": "runs", "target": RUNS_FOLDER}
    volumes = [*mounts, runs, *service.get("volumes", [])]
    return {**service, "volumes": volumes, "secrets": list(COORDINATOR_KEYS)}


def _agent(deployment: Deployment, options: ComposeOptions) -> dict[str, Any]:
    """The agents run until the coordinator has ended: Compose then stops them."""
    limits = {"cpus": str(deployment.resources.cpus), "memory": deployment.resources.memory}
    return {
        **_service(options, deployment.agent_arguments("coordinator", KEYS_FOLDER)),
        "depends_on": ["coordinator"],
        "secrets": list(AGENT_KEYS),
        "deploy": {"replicas": deployment.agents, "resources": {"limits": limits}},
    }


def _service(options: ComposeOptions, arguments: list[str]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if options.data is not None:
        mount = _mount(_escaped(str(options.data.resolve())), DATA_FOLDER)
        data = {"environment": {"SHOAL_DATA": DATA_FOLDER}, "volumes": [mount]}
    return {
        "image": options.image,
        "command": arguments,
        # Compose mounts secrets with the owner and the mode that their files have on the machine.
        "user": f"${{SHOAL_USER:-{os.geteuid()}:{os.getegid()}}}",
        "networks": ["shoal"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        **data,
    }


def _mount(source: str, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": source, "target": target, "read_only": True}


def _escaped(path: str) -> str:
    """Compose replaces $NAME by variables of the environment."""
    return path.replace("$", "$$")
