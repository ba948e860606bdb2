"""`shoal deploy` writes files that SLURM, Kubernetes and Docker Compose accept, and rejects wrong input."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from conftest import SMALL
from process_runs import HELD
from shoal.cli.main import _parser
from shoal.experiment import Experiment

KINDS = ("slurm", "kubernetes", "compose")
PROCESSES = ("--set", 'engine="processes"')
COMMANDS = Path(sys.executable).parent
"""The folder of the commands that the development dependencies install."""


@pytest.fixture
def deploy(small: Path, shoal: Callable[..., Any]) -> Callable[..., Path]:
    """Deploy the small experiment, and return the folder."""

    def deploy(kind: str, *options: object) -> Path:
        result = shoal("deploy", kind, small, *PROCESSES, "--out", "out", "--force", *options)
        assert result.code == 0, result
        return Path("out")

    return deploy


def add_files(small: Path) -> None:
    """Make the experiment name a plug-in and a graph."""
    (small.parent / "held.py").write_text(HELD)
    (small.parent / "graph.txt").write_text("".join(f"{i} {(i + 1) % 6}\n" for i in range(6)))
    algorithm = '{ name = "held.py:Held", rounds = 1, held = 1 }'
    text = SMALL.replace('{ name = "dpsgd", rounds = 4 }', algorithm)
    text = text.replace('{ name = "regular", degree = 3, dynamic = true }', '{ name = "file", path = "graph.txt" }')
    small.write_text(text)


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


# All kinds


@pytest.mark.parametrize("kind", KINDS)
def test_the_experiment_is_written_with_its_overrides_and_files(
    kind: str, small: Path, deploy: Callable[..., Path]
) -> None:
    add_files(small)
    folder = deploy(kind, "--set", "seed=7")
    (small.parent / "held.py").unlink()
    (small.parent / "graph.txt").unlink()
    experiment = Experiment.from_file(folder / "experiment.toml")
    assert (experiment.seed, experiment.engine, experiment.nodes) == (7, "processes", 6)
    assert (folder / "0" / "held.py").read_text() == HELD


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_printed(kind: str, small: Path, shoal: Callable[..., Any]) -> None:
    result = shoal("deploy", kind, small, *PROCESSES)
    assert result.code == 0, result
    assert f"small-{kind}" in result.out
    start = {"slurm": "sbatch job.sh", "kubernetes": "kubectl apply -f kubernetes.yaml", "compose": "docker compose up"}
    assert start[kind] in result.out


# SLURM


@pytest.mark.parametrize("plug_in", [False, True])
def test_the_script_passes_shellcheck(plug_in: bool, small: Path, deploy: Callable[..., Path]) -> None:
    if plug_in:
        add_files(small)
    folder = deploy("slurm", "--setup", "module load python", "--partition", "short")
    shellcheck = shutil.which("shellcheck", path=f"{COMMANDS}:{os.environ['PATH']}")
    assert shellcheck is not None, "install the development dependencies"
    done = subprocess.run([shellcheck, folder / "job.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("--allow-code" in (folder / "job.sh").read_text()) == plug_in


def test_the_stand_in_passes_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{COMMANDS}:{os.environ['PATH']}")
    assert shellcheck is not None
    script = Path(__file__).with_name("stand_in_srun.sh")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_slurm_is_asked_for_the_resources(deploy: Callable[..., Path]) -> None:
    options = ("--agents", 5, "--cpus-per-task", 3, "--mem", "2G", "--time", "2-00:30:00", "--partition", "short")
    lines = (deploy("slurm", *options, "--account", "lab") / "job.sh").read_text().splitlines()
    requests = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH ")}
    expected = {"nodes=5", "ntasks-per-node=1", "cpus-per-task=3", "mem=2G", "time=2-00:30:00", "partition=short"}
    assert expected | {"account=lab", "job-name=shoal-small", "signal=B:TERM@120"} <= requests
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]  # SLURM ignores these


# Kubernetes


@pytest.fixture
def manifests(small: Path, deploy: Callable[..., Path]) -> dict[str, Any]:
    """The manifests of an experiment with files, by name."""
    add_files(small)
    folder = deploy("kubernetes", "--agents", 3, "--data", "data-sets", "--cpus", 2, "--mem", "4G")
    found = documents(folder / "kubernetes.yaml") + documents(folder / "results.yaml")
    return {f"{manifest['kind']}/{manifest['metadata']['name']}": manifest for manifest in found}


def test_the_manifests_match_the_schemas_of_kubernetes(manifests: dict[str, Any]) -> None:
    assert len(manifests) == 6
    for manifest in manifests.values():
        for version in ("1.27", "1.31", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_manifest_does_not_match(manifests: dict[str, Any]) -> None:
    job = manifests["Job/shoal-small-agents"]
    job["spec"]["completionz"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_agents_are_an_indexed_job_that_connects_to_the_service(manifests: dict[str, Any]) -> None:
    service = manifests["Service/shoal-small-coordinator"]["spec"]
    coordinator = manifests["Job/shoal-small-coordinator"]["spec"]["template"]
    agents = manifests["Job/shoal-small-agents"]["spec"]
    assert (agents["completionMode"], agents["completions"], agents["parallelism"]) == ("Indexed", 3, 3)
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= coordinator["metadata"]["labels"].items()
    arguments = agents["template"]["spec"]["containers"][0]["args"]
    assert option(arguments, "--join") == f"shoal-small-coordinator:{service['ports'][0]['port']}"
    assert option(arguments, "--host") == "$(POD_IP)"
    assert "--allow-code" in arguments
    assert "--once" in arguments
    listen = option(coordinator["spec"]["containers"][0]["args"], "--listen")
    assert listen.endswith(f":{service['ports'][0]['port']}")


def test_the_volumes_of_every_container_exist(manifests: dict[str, Any]) -> None:
    jobs = [m["spec"]["template"]["spec"] for m in manifests.values() if m["kind"] == "Job"]
    for pod in [*jobs, manifests["Pod/shoal-small-results"]["spec"]]:
        names = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= names
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["restartPolicy"] == "Never"
        assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_config_map_has_the_files_of_the_experiment(manifests: dict[str, Any], tmp_path: Path) -> None:
    config = manifests["ConfigMap/shoal-small-experiment"]
    volumes = manifests["Job/shoal-small-coordinator"]["spec"]["template"]["spec"]["volumes"]
    items = next(v["configMap"]["items"] for v in volumes if "configMap" in v)
    for item in items:  # as the volume shows them
        path = tmp_path / "mounted" / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config["data"][item["key"]])
    assert Experiment.from_file(tmp_path / "mounted" / "experiment.toml").nodes == 6


def test_binary_files_fit_into_the_config_map(tmp_path: Path) -> None:
    from shoal.cli.deploy.deployment import Deployment, Resources
    from shoal.cli.deploy.kubernetes import KubernetesOptions, kubernetes_files

    deployment = Deployment("shoal-small", 1, Resources(), {"experiment.toml": b"", "0/matrix.npy": b"\x93NUMPY\xff"})
    config = next(yaml.safe_load_all(kubernetes_files(deployment, KubernetesOptions())["kubernetes.yaml"]))
    assert base64.b64decode(config["binaryData"]["file-0"]) == b"\x93NUMPY\xff"
    kubernetes_validate.validate(config, kubernetes_validate.latest_version(), strict=True)


# Docker Compose


@pytest.fixture
def compose(small: Path, deploy: Callable[..., Path]) -> dict[str, Any]:
    add_files(small)
    folder = deploy("compose", "--agents", 3, "--data", "data $sets")
    [table] = documents(folder / "compose.yaml")
    return table


def test_the_compose_file_matches_the_compose_specification(compose: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, "out/compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    compose["services"]["agent"]["replicaz"] = 3
    Path("out/compose.yaml").write_text(yaml.safe_dump(compose))
    done = subprocess.run([*command, "out/compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "replicaz" in done.stdout


def test_all_names_in_the_compose_file_are_defined(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        assert set(service["networks"]) <= set(compose["networks"])
        assert set(service["secrets"]) <= set(compose["secrets"])
        assert set(service.get("depends_on", ())) <= set(services)
        for mount in service["volumes"]:
            assert mount["type"] == "bind" or mount["source"] in compose["volumes"]
        for file in (option(service["command"], "--key"), option(service["command"], "--trust")):
            assert file.removeprefix("/run/secrets/") in service["secrets"]
    join = option(services["agent"]["command"], "--join")
    assert join.partition(":")[0] in services
    assert option(services["coordinator"]["command"], "--listen") == f"0.0.0.0:{join.partition(':')[2]}"
    assert services["agent"]["deploy"]["replicas"] == 3
    assert option(services["coordinator"]["command"], "--expect") == "3"
    assert "coordinator.key_secret" not in services["agent"]["secrets"]


def test_the_coordinator_sees_all_files(compose: dict[str, Any]) -> None:
    mounts = {m["target"]: m["source"] for m in compose["services"]["coordinator"]["volumes"]}
    for target, source in mounts.items():
        if target.startswith("/experiment"):
            assert (Path("out") / source).exists()
    assert tomllib.loads((Path("out") / mounts["/experiment/experiment.toml"]).read_text())["nodes"] == 6
    files = (Path("out") / mounts["/experiment/0"]).iterdir()
    assert {file.name for file in files} == {"held.py", "graph.txt"}, "files of one folder stay in one folder"
    assert mounts["/data"].endswith("data $$sets")  # as Compose writes a dollar sign


def test_the_commands_of_containers_are_valid(compose: dict[str, Any], manifests: dict[str, Any]) -> None:
    commands = [service["command"] for service in compose["services"].values()]
    pods = [m["spec"]["template"]["spec"] for m in manifests.values() if m["kind"] == "Job"]
    for arguments in [*commands, *(pod["containers"][0]["args"] for pod in pods)]:
        parsed = _parser().parse_args(arguments)
        assert parsed.key is not None


# Wrong input


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["docker", "small.toml"], "invalid choice: 'docker'"),
        (["slurm", "missing.toml"], "missing.toml"),
        (["slurm", "small.toml"], 'engine="processes"'),
        (["slurm", "small.toml", *PROCESSES, "--set", "nodez=3"], "nodez"),
        (["slurm", "small.toml", *PROCESSES, "--agents", "0"], "expected a whole number of at least 1"),
        (["slurm", "small.toml", *PROCESSES, "--agents", "-1"], "--agents"),
        (["slurm", "small.toml", *PROCESSES, "--mem", "lots"], "expected a size such as 8G"),
        (["slurm", "small.toml", *PROCESSES, "--time", "1h\n#SBATCH --exclusive"], "expected a duration"),
        (["slurm", "small.toml", *PROCESSES, "--partition", "a b"], "expected the name of a partition"),
        (["slurm", "small.toml", *PROCESSES, "--keys", "nowhere"], "nowhere"),
        (["slurm", "small.toml", *PROCESSES, "--out", "small.toml"], "is not a folder"),
        (["slurm", "small.toml", *PROCESSES, "--out", "small.toml/out"], "cannot write"),
        (["slurm", "small.toml", *PROCESSES, "--set", 'processes.shaping="kernel"'], "one machine only"),
        (["compose", "small.toml", *PROCESSES, "--partition", "short"], "--partition"),
        (["kubernetes", "small.toml", *PROCESSES, "--storage", "big"], "expected a size such as 1Gi"),
    ],
)
def test_wrong_input_is_rejected(arguments: list[str], problem: str, small: Path, shoal: Callable[..., Any]) -> None:
    before = sorted(small.parent.iterdir())
    result = shoal("deploy", *arguments)
    assert result.code == 2, result
    assert problem in result.err
    assert "Traceback" not in result.err
    assert sorted(small.parent.iterdir()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_are_not_overwritten(kind: str, small: Path, shoal: Callable[..., Any]) -> None:
    Path("out").mkdir()
    Path("out/experiment.toml").write_text("mine")
    result = shoal("deploy", kind, small, *PROCESSES, "--out", "out")
    assert result.code == 2
    assert "--force" in result.err
    assert [path.name for path in Path("out").iterdir()] == ["experiment.toml"]
    assert Path("out/experiment.toml").read_text() == "mine"
    Path("out/other").write_text("mine")
    assert shoal("deploy", kind, small, *PROCESSES, "--out", "out", "--force").code == 0
    assert Path("out/experiment.toml").read_text() != "mine"
    assert Path("out/other").read_text() == "mine"


def test_more_agents_than_nodes_give_a_warning(small: Path, shoal: Callable[..., Any]) -> None:
    result = shoal("deploy", "slurm", small, *PROCESSES, "--agents", 9)
    assert result.code == 0
    assert "3 agents get no nodes" in result.out
    assert "get no nodes" not in shoal("deploy", "slurm", small, *PROCESSES, "--agents", 6, "--force").out


def test_files_that_are_too_large_for_a_config_map_are_rejected(small: Path, shoal: Callable[..., Any]) -> None:
    add_files(small)
    with (small.parent / "held.py").open("a") as file:
        file.write("#" * 2**20)
    result = shoal("deploy", "kubernetes", small, *PROCESSES)
    assert result.code == 2
    assert "ConfigMap" in result.err


# Agents of a deployment


@pytest.mark.parametrize("address", ["127.0.0.1:9", "unknown-host.invalid:7700"])
def test_an_agent_without_a_coordinator_ends_after_its_wait(address: str, shoal: Callable[..., Any]) -> None:
    shoal("keys", "make", "keys", "--name", "coordinator", "--name", "agent")
    keys = ("--key", "keys/agent.key_secret", "--trust", "keys/coordinator.key")
    result = shoal("agent", "--join", address, "--host", "127.0.0.1", "--once", "--wait", 1, *keys)
    assert result.code == 1
    assert "no run has begun in 1 s" in result.out
