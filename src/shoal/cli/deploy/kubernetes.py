"""Manifests for Kubernetes: a coordinator Job with its Service, and the agents as an Indexed Job."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cli.deploy.deployment import AGENT_KEYS, COORDINATOR_KEYS, KEYS, PORT, Deployment
from shoal.cli.deploy.yaml_files import to_yaml
from shoal.errors import ExperimentError

MANIFESTS = "kubernetes.yaml"
RESULTS = "results.yaml"
USER = 10001
"""The user id of the image and of the pods."""
MAX_CONFIG_BYTES = 2**20 - 2**14
"""The most bytes of the files of an experiment: a ConfigMap holds 1 MiB."""
COORDINATOR_CPUS, COORDINATOR_MEMORY = 1, "2Gi"
EXPERIMENT_FOLDER, RUNS_FOLDER, DATA_FOLDER = "/experiment", "/runs", "/data"
SECRET_FOLDER, KEYS_FOLDER = "/secret", "/keys"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class KubernetesOptions:
    """What the pods use."""

    image: str = "shoal:latest"
    storage: str = "1Gi"
    """The size of the volume for the folder of runs."""
    keys: Path | None = None
    """A folder of keys, for the commands that make the Secrets; None: `keys` beside the manifests."""
    data: str | None = None
    """The name of a PersistentVolumeClaim with data sets, which all pods can read."""


def kubernetes_files(deployment: Deployment, options: KubernetesOptions) -> dict[str, bytes]:
    """Return the files of a deployment on Kubernetes. Raises `ExperimentError` if its files are too large."""
    size = sum(map(len, deployment.files.values()))
    if size > MAX_CONFIG_BYTES:
        raise ExperimentError(
            [f"the experiment and the files that it names have {size} bytes; a ConfigMap holds {MAX_CONFIG_BYTES}"],
            deployment.name,
        )
    manifests = [
        _config_map(deployment),
        _claim(deployment, options),
        _service(deployment),
        _coordinator(deployment, options),
        _agents(deployment, options),
    ]
    return {
        MANIFESTS: to_yaml(manifests),
        RESULTS: to_yaml([_results(deployment, options)]),
        **deployment.files,
    }


def kubernetes_steps(deployment: Deployment, options: KubernetesOptions, folder: Path) -> list[str]:
    """Return the commands that start a deployment."""
    name = deployment.name
    keys = Path(KEYS) if options.keys is None else options.keys.resolve()
    make = [f"shoal keys make {KEYS} --name coordinator --name agent"] if options.keys is None else []
    secrets = [
        " ".join(
            [
                f"kubectl create secret generic {name}-{role}",
                *(f"--from-file={shlex.quote(str(keys / file))}" for file in files),
            ]
        )
        for role, files in (("coordinator", COORDINATOR_KEYS), ("agents", AGENT_KEYS))
    ]
    return [
        f"cd {shlex.quote(str(folder))}",
        *make,
        *secrets,
        f"kubectl apply -f {MANIFESTS}",
        f"kubectl logs --follow job/{name}-coordinator --pod-running-timeout=10m",
    ]


def _config_map(deployment: Deployment) -> Manifest:
    texts: dict[str, str] = {}
    binary: dict[str, str] = {}
    for name, key in _config_keys(deployment).items():
        content = deployment.files[name]
        try:
            texts[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(deployment, "experiment"), "data": texts}
    return {**manifest, "binaryData": binary} if binary else manifest


def _config_keys(deployment: Deployment) -> dict[str, str]:
    """Return the keys of files in the ConfigMap, by path. Keys cannot have slashes; the volume restores the paths."""
    in_folders = [name for name in deployment.files if "/" in name]
    return {name: name for name in deployment.files} | {name: f"file-{i}" for i, name in enumerate(in_folders)}


def _claim(deployment: Deployment, options: KubernetesOptions) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(deployment, "runs"),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": options.storage}}},
    }


def _service(deployment: Deployment) -> Manifest:
    """A headless Service: its name is the address of the coordinator's pod."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployment, "coordinator"),
        "spec": {
            "clusterIP": "None",
            "selector": _labels(deployment, "coordinator"),
            "publishNotReadyAddresses": True,
            "ports": [{"name": "agents", "port": PORT}],
        },
    }


def _coordinator(deployment: Deployment, options: KubernetesOptions) -> Manifest:
    arguments = deployment.coordinator_arguments(EXPERIMENT_FOLDER, KEYS_FOLDER, RUNS_FOLDER)
    container = _container(options, "coordinator", arguments, COORDINATOR_CPUS, COORDINATOR_MEMORY)
    container["ports"] = [{"containerPort": PORT}]
    volumes = {
        "experiment": (EXPERIMENT_FOLDER, _config_volume(deployment)),
        "runs": (RUNS_FOLDER, {"persistentVolumeClaim": {"claimName": f"{deployment.name}-runs"}}),
    }
    spec = {"backoffLimit": 0, "template": _pod(deployment, options, "coordinator", container, volumes)}
    return _job(deployment, "coordinator", spec)


def _agents(deployment: Deployment, options: KubernetesOptions) -> Manifest:
    # Kubernetes sets JOB_COMPLETION_INDEX in the pods of an Indexed Job.
    address = ["--host", "$(POD_IP)", "--name", "agent-$(JOB_COMPLETION_INDEX)", "--once"]
    arguments = [*deployment.agent_arguments(f"{deployment.name}-coordinator", KEYS_FOLDER), *address]
    resources = deployment.resources
    container = _container(options, "agent", arguments, resources.cpus, f"{resources.memory}i")
    container["env"] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    template = _pod(deployment, options, "agents", container, {})
    template["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": _labels(deployment, "agents")},
        }
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": deployment.agents,
        "parallelism": deployment.agents,
        "backoffLimit": deployment.agents,  # an agent that fails does not end the others
        "template": template,
    }
    return _job(deployment, "agents", spec)


def _results(deployment: Deployment, options: KubernetesOptions) -> Manifest:
    """A pod from which the folder of runs can be copied after the run."""
    container = _container(options, "results", ["3600"], 1, "256Mi")
    container["command"] = ["sleep"]
    container["volumeMounts"] += [{"name": "runs", "mountPath": RUNS_FOLDER}]
    claim = {"claimName": f"{deployment.name}-runs"}
    spec = _pod_spec([container], [{"name": "runs", "persistentVolumeClaim": claim}])
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(deployment, "results"), "spec": spec}


def _job(deployment: Deployment, role: str, spec: Manifest) -> Manifest:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(deployment, role), "spec": spec}


def _pod(
    deployment: Deployment,
    options: KubernetesOptions,
    role: str,
    container: Manifest,
    volumes: Mapping[str, tuple[str, Manifest]],
) -> Manifest:
    """The template of a pod with the keys of its role, and with volumes by name: where, and what."""
    # Files of a Secret can be read by a group, and Shoal rejects secret keys that others can read: copy them.
    copy = f"umask 077 && cp -L {SECRET_FOLDER}/*.key* {KEYS_FOLDER}/"
    keys_mount = {"name": "keys", "mountPath": KEYS_FOLDER}
    init = _container(options, "keys", ["-c", copy], 1, "64Mi")
    init["command"] = ["sh"]
    init["volumeMounts"] += [{"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True}, keys_mount]
    container["volumeMounts"] += [keys_mount, *({"name": n, "mountPath": path} for n, (path, _) in volumes.items())]
    pod_volumes: list[Manifest] = [
        {"name": "secret", "secret": {"secretName": f"{deployment.name}-{role}"}},
        {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        *({"name": name, **volume} for name, (_, volume) in volumes.items()),
    ]
    if options.data is not None:
        container["volumeMounts"].append({"name": "data", "mountPath": DATA_FOLDER, "readOnly": True})
        container.setdefault("env", []).append({"name": "SHOAL_DATA", "value": DATA_FOLDER})
        pod_volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": options.data, "readOnly": True}})
    spec = {**_pod_spec([container], pod_volumes), "initContainers": [init]}
    return {"metadata": {"labels": _labels(deployment, role)}, "spec": spec}


def _pod_spec(containers: list[Manifest], volumes: list[Manifest]) -> Manifest:
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers,
        "volumes": [*volumes, {"name": "temporary", "emptyDir": {}}],
    }


def _container(options: KubernetesOptions, name: str, arguments: list[str], cpus: int, memory: str) -> Manifest:
    resources = {"cpu": str(cpus), "memory": memory}
    return {
        "name": name,
        "image": options.image,
        "imagePullPolicy": "IfNotPresent",
        "args": arguments,
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "temporary", "mountPath": "/tmp"}],
    }


def _config_volume(deployment: Deployment) -> Manifest:
    items = [{"key": key, "path": name} for name, key in _config_keys(deployment).items()]
    return {"configMap": {"name": f"{deployment.name}-experiment", "items": items}}


def _metadata(deployment: Deployment, role: str) -> Manifest:
    return {"name": f"{deployment.name}-{role}", "labels": _labels(deployment, role)}


def _labels(deployment: Deployment, role: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "shoal",
        "app.kubernetes.io/instance": deployment.name,
        "app.kubernetes.io/component": role,
    }
