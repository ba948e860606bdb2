"""`shoal deploy`: write the files that run an experiment on SLURM, Kubernetes or Docker Compose."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, add_set_option, positive_integer
from shoal.cli.display import console, print_line, show_warnings

if TYPE_CHECKING:
    from shoal.cli.deploy.deployment import Deployment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the files that run an experiment on a cluster: a coordinator, and agents that connect to "
        "it. Nothing is started; the commands that start the deployment are printed."
    )
    kinds = parser.add_subparsers(required=True, metavar="kind")
    slurm = _add_kind(kinds, "slurm", "a batch script for SLURM", deploy_slurm)
    slurm.add_argument("--time", type=_matching(r"[0-9][0-9:-]*", "a duration such as 01:30:00"), default="01:00:00",
                       help="the longest duration of the job (default: 01:00:00)")  # fmt: skip
    slurm.add_argument("--partition", type=_matching(r"[\w.,+-]+", "the name of a partition"), help="the partition")
    slurm.add_argument("--account", type=_matching(r"[\w.,+-]+", "the name of an account"), help="the account")
    slurm.add_argument("--setup", action="append", default=[], metavar="COMMAND",
                       help="a shell command that makes shoal available on a node, such as 'source "
                       "~/venv/bin/activate'; may be repeated")  # fmt: skip
    kubernetes = _add_kind(kinds, "kubernetes", "manifests for Kubernetes", deploy_kubernetes)
    kubernetes.add_argument("--storage", type=_matching(r"\d+[KMGT]i?", "a size such as 1Gi"), default="1Gi",
                            help="the size of the volume for the folder of runs (default: 1Gi)")  # fmt: skip
    kubernetes.add_argument("--data", type=_matching(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "the name of a claim"),
                            metavar="CLAIM", help="a PersistentVolumeClaim with data sets")  # fmt: skip
    compose = _add_kind(kinds, "compose", "a file for Docker Compose", deploy_compose)
    compose.add_argument("--data", type=Path, metavar="FOLDER", help="a folder with data sets on the machine")
    for kind in (kubernetes, compose):
        kind.add_argument("--image", type=_matching(r"[\w./:@-]+", "the name of an image"), default="shoal:latest",
                          help="the image that the Dockerfile builds (default: shoal:latest)")  # fmt: skip


def _add_kind(
    kinds: Commands, name: str, what: str, command: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=f"write {what}", description=f"Write {what}.")
    parser.add_argument("file", type=Path, help="the experiment, a TOML file")
    parser.add_argument("--agents", type=positive_integer, default=2, metavar="N", help="how many agents (default: 2)")
    parser.add_argument("--out", type=Path, help="the folder to write to (default: <experiment>-<kind>)")
    parser.add_argument("--force", action="store_true", help="write to a folder that has files, and overwrite them")
    add_set_option(parser, "set a key of the experiment: a dotted name and a TOML value; may be repeated")
    parser.add_argument("--cpus-per-task", "--cpus", type=positive_integer, default=4, dest="cpus", metavar="N",
                        help="the cores of each agent (default: 4)")  # fmt: skip
    parser.add_argument("--mem", type=_matching(r"[1-9]\d*[KMGT]", "a size such as 8G"), default="8G",
                        help="the memory of each agent (default: 8G)")  # fmt: skip
    parser.add_argument("--keys", type=Path, metavar="FOLDER",
                        help="keys that 'shoal keys make' has made (default: every SLURM job makes new keys; "
                        "Kubernetes and Compose use the folder 'keys', which you make)")  # fmt: skip
    parser.set_defaults(command=command, kind=name)
    return parser


def _matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return a parser of arguments that match a pattern; argparse prints the error."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        return text

    return parse


def deploy_slurm(parsed: argparse.Namespace) -> int:
    from shoal.cli.deploy.slurm import SlurmOptions, slurm_files, slurm_steps

    deployment, folder = _plan(parsed)
    options = SlurmOptions(parsed.time, parsed.partition, parsed.account, parsed.setup, parsed.keys)
    return _write(parsed, folder, slurm_files(deployment, options), slurm_steps(folder))


def deploy_kubernetes(parsed: argparse.Namespace) -> int:
    from shoal.cli.deploy.kubernetes import KubernetesOptions, kubernetes_files, kubernetes_steps

    deployment, folder = _plan(parsed)
    options = KubernetesOptions(parsed.image, parsed.storage, parsed.keys, parsed.data)
    files = kubernetes_files(deployment, options)
    return _write(parsed, folder, files, kubernetes_steps(deployment, options, folder))


def deploy_compose(parsed: argparse.Namespace) -> int:
    from shoal.cli.deploy.compose import ComposeOptions, compose_files, compose_steps

    deployment, folder = _plan(parsed)
    options = ComposeOptions(parsed.image, parsed.data, parsed.keys)
    with show_warnings(console()):
        files = compose_files(deployment, options)
    return _write(parsed, folder, files, compose_steps(folder, options))


def _plan(parsed: argparse.Namespace) -> tuple[Deployment, Path]:
    """Validate the experiment and the keys. Returns the deployment and its folder."""
    from shoal.cli.deploy.deployment import Resources, check_keys, plan_deployment
    from shoal.experiment import Experiment, parse_overrides

    with show_warnings(console()):
        experiment = Experiment.from_file(parsed.file, parse_overrides(parsed.settings))
        deployment = plan_deployment(experiment, parsed.agents, Resources(parsed.cpus, parsed.mem))
        if parsed.kind != "slurm" and deployment.dataset_path is not None:
            warnings.warn(
                f"dataset.path = {deployment.dataset_path!r}: every container needs the data set at this path",
                stacklevel=2,
            )
    if parsed.keys is not None:
        check_keys(parsed.keys)
    return deployment, parsed.out or Path(f"{experiment.name}-{parsed.kind}")


def _write(parsed: argparse.Namespace, folder: Path, files: dict[str, bytes], steps: list[str]) -> int:
    from shoal.cli.deploy.deployment import write_files

    write_files(folder, files, parsed.force)
    print_line(f"wrote {', '.join(files)} to {folder}; next:")
    for step in steps:
        print_line(f"  {step}")
    return 0
