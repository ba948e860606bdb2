"""A batch script for SLURM: one agent on each node of the job, and the coordinator on the first node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.deploy.deployment import EXPERIMENT, WAIT_SECONDS, Deployment

SCRIPT = "job.sh"
BODY = Path(__file__).with_name("slurm_job.sh")
"""What every script has in common. The lines before it set the variables that it uses."""
WARNING_SECONDS = 120
"""How long before the end of its time a job receives SIGTERM."""


@dataclass(frozen=True)
class SlurmOptions:
    """What SLURM is asked for."""

    time: str = "01:00:00"
    partition: str | None = None
    account: str | None = None
    setup: Sequence[str] = ()
    """Shell commands that make `shoal` available on a node."""
    keys: Path | None = None
    """A folder of keys; None: the job makes its own, and removes them at the end."""


def slurm_files(deployment: Deployment, options: SlurmOptions) -> dict[str, bytes]:
    """Return the files of a deployment on SLURM."""
    return {SCRIPT: _script(deployment, options).encode(), **deployment.files}


def slurm_steps(folder: Path) -> list[str]:
    """Return the commands that start a deployment."""
    return [f"cd {shlex.quote(str(folder))} && sbatch {SCRIPT}"]


def _script(deployment: Deployment, options: SlurmOptions) -> str:
    resources = deployment.resources
    requests = {
        "job-name": deployment.name,
        "nodes": deployment.agents,
        "ntasks-per-node": 1,
        "cpus-per-task": resources.cpus,
        "mem": resources.memory,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": "shoal-%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{WARNING_SECONDS}",
    }
    accepted = " --allow-code" if deployment.runs_code else ""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}={value}" for key, value in requests.items() if value is not None),
        "",
        "# Commands that make shoal available on a node.",
        *(options.setup or ["# For example: source ~/venv/bin/activate"]),
        "",
        f"experiment={EXPERIMENT}",
        f"agents=${{SLURM_JOB_NUM_NODES:-{deployment.agents}}}",
        f"cpus=${{SLURM_CPUS_PER_TASK:-{resources.cpus}}}",
        f"keys={'' if options.keys is None else shlex.quote(str(options.keys.resolve()))}",
        f"agent_options=(--once --wait {WAIT_SECONDS}{accepted})",
        "",
    ]
    return "\n".join(lines) + "\n" + BODY.read_text(encoding="utf-8")
