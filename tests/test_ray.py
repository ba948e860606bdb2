"""Runs on a Ray cluster, of both engines: three Ray nodes with one CPU each, on this machine."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoint_runs import stopped_after
from conftest import CommandResult
from shoal.engines.ray import agents
from shoal.engines.ray import cluster as clusters
from shoal.errors import ExperimentError, LaunchError, RunError
from shoal.experiment import Experiment
from shoal.experiment.resuming import resume
from shoal.experiment.running import Machines, run
from shoal.results.progress import Progress
from shoal.results.records import Round
from shoal.types import parse_node_ids

pytestmark = pytest.mark.slow
CPUS, ROUNDS = 3, 5
NODE = {"num_cpus": 1, "object_store_memory": 2**27}
BASE: dict[str, Any] = {
    "nodes": 6,
    "seed": 3,
    "algorithm": {"name": "dpsgd", "rounds": 3},
    "training": {"lr": 0.05, "momentum": 0.9, "batch_size": 8, "local_steps": 2},
    "evaluation": {"every": 2, "samples": 50},
}
PLUGIN = '''
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from shoal.data.dataset import Data, Samples
from shoal.data.digits import Digits


@dataclass(frozen=True)
class Observed:
    """The digits. Notes which process loads them on which Ray node, and changes one value on some of the nodes."""

    folder: str
    changed_on: tuple[str, ...] = ()

    def load(self, seed: int) -> Data:
        data = Digits().load(seed)
        node = ray.get_runtime_context().get_node_id()
        (Path(self.folder) / f"{os.getpid()} {node}").touch()
        if node not in self.changed_on:
            return data
        x = np.array(data.train.x)
        x[5] += 1
        return Data(Samples(x, data.train.y), data.test, data.classes, scaling=data.scaling)
'''
HELD = '''
import os
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.algorithms.dpsgd import DPSGD


@dataclass(frozen=True)
class Held(DPSGD):
    """D-PSGD whose nodes stay in round 2 until a test puts a file into `folder`. Notes trainings at the same time."""

    folder: str = ""

    async def run(self, node):
        train, learn = node.train, node.trainer.train

        def learn_alone(params, steps=None):
            mark = Path(self.folder) / f"training {os.getppid()}"
            try:
                mark.mkdir()
            except FileExistsError:
                (Path(self.folder) / "at the same time").touch()
                return learn(params, steps)
            time.sleep(0.02)
            try:
                return learn(params, steps)
            finally:
                mark.rmdir()

        async def train_when_released(params, steps=None):
            while node.next_round >= 2 and not (Path(self.folder) / "go-on").exists():
                await node.sleep(0.02)
            return await train(params, steps)

        node.train, node.trainer.train = train_when_released, learn_alone
        await super().run(node)
'''


def experiment(batching: str = "ray", workers: int | None = None, **changed: Any) -> Experiment:
    return Experiment(**{**BASE, "simulation": {"batching": batching, "workers": workers}, **changed})


def ray_processes() -> list[psutil.Process]:
    """The processes of Ray that descend from this process."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE and is_ray(p)]


def is_ray(process: psutil.Process) -> bool:
    try:
        return any("ray" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[None]:
    """Ray reads these variables when it is imported: a token of its own, and no file in the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'shoal[ray]'")
        yield


@pytest.fixture(scope="module")
def cluster(ray_environment: None) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(CPUS - 1):
            started.add_node(**NODE)
        started.wait_for_nodes()
        yield started
    finally:
        started.shutdown()
    assert wait_until(lambda: not ray_processes()), ray_processes()


@pytest.fixture
def observed(tmp_path: Path) -> dict[str, Any]:
    """A data set that notes where it is loaded."""
    (tmp_path / "observed.py").write_text(PLUGIN)
    (tmp_path / "loaded").mkdir()
    return {"name": f"{tmp_path}/observed.py:Observed", "folder": str(tmp_path / "loaded")}


def loaded_on(tmp_path: Path) -> dict[int, str]:
    """The Ray node of each process, other than this one, that loaded the data."""
    found = (path.name.split() for path in (tmp_path / "loaded").iterdir())
    return {int(pid): node for pid, node in found if int(pid) != os.getpid()}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {
            "algorithm": {"name": "fedavg", "rounds": 3, "fraction": 0.5},
            "training": {**BASE["training"], "keep_state": True},
            "workers": 2,
        },
        {"sharing": {"name": "choco"}, "nodes": 5, "workers": 2},
    ],
    ids=["dpsgd", "fedavg", "choco"],
)
def test_models_are_equal_to_those_of_one_machine(changed: dict[str, Any], cluster: Any, tmp_path: Path) -> None:
    runs = [experiment(way, **changed).run(tmp_path, ray=cluster.address) for way in ("off", "pool", "ray")]
    summaries = [each.summary for each in runs]
    assert summaries[2]["batching"] == "ray"
    for key in ("digest", "accuracy", "loss", "bytes_sent", "status"):
        assert summaries[0][key] == summaries[1][key] == summaries[2][key]
    assert summaries[2]["time"]["total_cpu_s"] >= summaries[2]["time"]["train_cpu_s"] > 0
    assert Experiment.from_file(runs[2].folder.experiment).simulation.batching == "ray"


class KillsWorker:
    """Kills one of the workers as soon as the run trains."""

    def __init__(self, find: Callable[[], int]) -> None:
        self._find = find
        self.killed: int | None = None

    def progress(self, progress: Progress) -> None:
        if progress.phase == "running" and self.killed is None:
            self.killed = self._find()
            os.kill(self.killed, signal.SIGKILL)

    def notice(self, text: str) -> None: ...


def test_every_ray_node_has_a_worker_and_a_killed_worker_ends_the_run(
    observed: dict[str, Any], cluster: Any, tmp_path: Path
) -> None:
    listener = KillsWorker(lambda: max(loaded_on(tmp_path)))
    endless = experiment(dataset=observed, algorithm={"name": "dpsgd", "rounds": 100_000})
    with pytest.raises(RunError, match=r"worker \d on .* Ray node \w{8}\), which trained 2 nodes, has failed") as error:
        run(endless, tmp_path / "runs", listener, ray=cluster.address)
    nodes = loaded_on(tmp_path)
    assert sorted(nodes.values()) == sorted(node.node_id for node in cluster.list_all_nodes())
    assert nodes[listener.killed or 0][:8] in str(error.value)
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in nodes))


def test_different_data_on_a_machine_is_an_error(observed: dict[str, Any], cluster: Any, tmp_path: Path) -> None:
    """At least one of two workers is not on the Ray node of this process."""
    others = [node.node_id for node in cluster.worker_nodes]
    changed = experiment(workers=2, dataset={**observed, "changed_on": others})
    with pytest.raises(LaunchError, match="the data set differs") as error:
        changed.run(tmp_path / "runs", ray=cluster.address)
    assert "the version" not in str(error.value)
    (listed,) = [line for line in str(error.value).splitlines() if "the data set" in line]
    equal, different = listed.split("; ")
    assert "(this process)" in equal
    nodes = loaded_on(tmp_path).values()
    assert len(nodes) == 2
    for node in nodes:
        assert f"Ray node {node[:8]}" in (different if node in others else equal)
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in loaded_on(tmp_path)))


def test_more_workers_than_cpus_are_an_error(cluster: Any, tmp_path: Path) -> None:
    started = time.monotonic()
    for workers, needs in (
        (5, "needs 5 CPUs, one for each worker"),
        (9, "needs 6 CPUs, one for each worker, because 6 nodes use at most 6 workers"),
    ):
        problem = f"workers = {workers} {needs}: the Ray cluster has 3 CPUs.*; set simulation.workers to 3 or less"
        with pytest.raises(LaunchError, match=problem):
            experiment(workers=workers).run(tmp_path, ray=cluster.address)
    assert time.monotonic() - started < 30
    assert not list(tmp_path.iterdir())


def test_cpus_that_others_use_are_an_error(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "RESERVE_SECONDS", 1.0)
    with clusters.ray_cluster(cluster.address, 1, 6):  # the runs use the same connection
        with pytest.raises(LaunchError, match=r"cannot reserve 3 CPUs within 1 s: .* and 2 of them are free"):
            experiment(workers=3).run(tmp_path)
        with clusters.ray_cluster(cluster.address, None, 6) as rest:
            assert len(rest.machines) == 2
            with pytest.raises(LaunchError, match="no worker can be started"):
                experiment().run(tmp_path)


def test_data_that_nodes_receive_do_not_reach_workers(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="batching = 'ray': its workers would not see the samples"):
        experiment(sharing={"name": "data"}).run(tmp_path, ray=cluster.address)


# Processes


def processes(tmp_path: Path, **plan: Any) -> Experiment:
    """24 nodes that stay in round 2 until they are released. The algorithm is a plug-in, which travels to agents."""
    (tmp_path / "held.py").write_text(HELD)
    return Experiment(
        name="processes",
        engine="processes",
        nodes=24,
        seed=3,
        algorithm={"name": "held.py:Held", "rounds": ROUNDS, "folder": str(tmp_path)},
        model={"name": "logistic"},
        training={"lr": 0.05, "batch_size": 8, "local_steps": 1},
        evaluation={"every": ROUNDS, "samples": 50},
        checkpoint={"every": 1, "keep": ROUNDS},
        processes=plan,
        base=tmp_path,
    )


class Observer:
    """Notes the Ray node of every agent, and calls `act` once, when nodes are in round 1 or 2."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self.ray_nodes: dict[str, str] = {}

    def progress(self, progress: Progress) -> None:
        if progress.phase == "running" and progress.round >= 1 and self._act is not None:
            act, self._act = self._act, None
            act()

    def notice(self, text: str) -> None:
        if found := re.fullmatch(r"agent '(.+)' is on .* Ray node (\w{8})\); CPUs: 1", text):
            self.ray_nodes[found[1]] = found[2]


@pytest.mark.usefixtures("no_process_is_left")
def test_processes_on_ray_nodes_give_the_models_of_one_machine(cluster: Any, tmp_path: Path) -> None:
    import ray

    free: list[float] = []

    def release() -> None:
        free.append(ray.available_resources().get("CPU", 0))
        (tmp_path / "go-on").touch()

    observer = Observer(release)
    done = run(processes(tmp_path), tmp_path / "runs", observer, ray=cluster.address)
    assert not (tmp_path / "at the same time").exists(), "an agent with one CPU trains one node at a time"
    alone = run(processes(tmp_path), tmp_path / "alone")
    resumed = resume(stopped_after(done.folder, 1, tmp_path / "resumed").path, machines=Machines(ray=cluster.address))
    for ours in (done.summary, resumed.summary):
        for key in ("digest", "accuracy", "bytes_sent", "messages_sent", "status"):
            assert ours[key] == alone.summary[key], key
    assert set(observer.ray_nodes.values()) == {node.node_id[:8] for node in cluster.list_all_nodes()}
    mapping = json.loads(done.folder.mapping.read_text())
    assert mapping == dict(zip(sorted(observer.ray_nodes), ("0-7", "8-15", "16-23"), strict=True))
    assert free == [0], "agents reserve the CPUs that they use"
    assert Experiment.from_file(done.folder.experiment).processes.sealed


@pytest.mark.usefixtures("no_process_is_left")
def test_a_ray_node_that_fails_takes_its_agent_with_it_and_no_other(cluster: Any, tmp_path: Path) -> None:
    failed = next(iter(cluster.worker_nodes))
    (raylet,) = failed.all_processes["raylet"]
    children: list[psutil.Process] = []

    def kill() -> None:
        children.extend(psutil.Process(raylet.process.pid).children(recursive=True))
        raylet.process.kill()
        assert wait_until(lambda: not any(process.is_running() for process in children)), children
        (tmp_path / "go-on").touch()

    observer = Observer(kill)
    try:
        done = run(processes(tmp_path), tmp_path / "runs", observer, ray=cluster.address)
    finally:
        cluster.remove_node(failed, allow_graceful=False)
        cluster.add_node(**NODE)
        cluster.wait_for_nodes()
    assert done.status == "incomplete"
    (agent,) = (name for name, node in observer.ray_nodes.items() if node == failed.node_id[:8])
    lost = parse_node_ids(json.loads(done.folder.mapping.read_text())[agent], 24)
    assert sorted(map(int, done.summary["lost"])) == sorted(lost)
    for node in set(range(24)) - set(lost):
        assert [r.round for r in done.folder.read(node) if isinstance(r, Round)] == list(range(ROUNDS))
    assert len(children) > len(lost), "the nodes are processes of the Ray node"


def test_agents_need_free_cpus(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "RESERVE_SECONDS", 1.0)
    with pytest.raises(LaunchError, match=r"training_slots = 2: no Ray node has 2 CPUs.* cluster has 3 CPUs"):
        processes(tmp_path, training_slots=2).run(tmp_path / "runs", ray=cluster.address)
    with clusters.ray_cluster(cluster.address, 1, 6):  # the run uses the same connection
        taken = r"cannot reserve 3 CPUs for agents on 3 Ray nodes within 1 s: .* and 2 of them are free"
        with pytest.raises(LaunchError, match=taken):
            processes(tmp_path).run(tmp_path / "runs", ray=cluster.address)


def test_an_agent_that_ray_does_not_start_in_time_is_an_error(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "START_SECONDS", 0.001)  # Ray starts a process for each agent
    with pytest.raises(LaunchError, match=r"the agent on .* did not start within 0\.001 s; check the machine"):
        processes(tmp_path).run(tmp_path / "runs", ray=cluster.address)


# The command line


def test_auto_connects_to_the_address_in_the_environment(
    cluster: Any, shoal: Callable[..., CommandResult], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    result = shoal("run", small, "--ray", "auto", "--set", "simulation.workers=4")
    assert result.code == 2
    assert "the Ray cluster has 3 CPUs" in result.err


def test_auto_works_if_ray_has_other_private_functions(cluster: Any, shoal: Any, small: Path, monkeypatch: Any) -> None:
    from ray._private import services

    find, failures = services.get_ray_address_from_environment, [TypeError("takes 1 positional argument")]

    def fail_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return find(*arguments)  # Ray itself calls it too

    monkeypatch.setattr(services, "get_ray_address_from_environment", fail_once)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    assert "the Ray cluster has 3 CPUs" in shoal("run", small, "--ray", "auto", "--set", "simulation.workers=4").err


def test_auto_does_not_wait_for_a_cluster_that_has_ended(
    ray_environment: None, shoal: Callable[..., CommandResult], small: Path, unused_port: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ray was killed, and the file with its address remains."""
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", cache(set[str]))  # other tests may run Ray on this machine
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{unused_port}")
    started = time.monotonic()
    result = shoal("run", small, "--ray", "auto")
    assert result.code == 2
    assert f"cannot connect to Ray at '127.0.0.1:{unused_port}'" in result.err
    assert "or give its address" in result.err
    assert time.monotonic() - started < 15


def test_auto_without_a_cluster_is_an_error(
    ray_environment: None, shoal: Callable[..., CommandResult], small: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", cache(set[str]))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = shoal("run", small, "--ray", "auto")
    assert result.code == 2
    assert "no Ray cluster runs on this machine; start it with 'ray start --head'" in result.err


@pytest.mark.parametrize(
    "settings",
    [
        ["simulation.workers=1", "engine='simulation'"],
        ["processes.training_slots=1", "engine='processes'", "evaluation.every=0"],
    ],
    ids=["simulation", "processes"],
)
def test_ctrl_c_leaves_no_process_of_ray(
    settings: list[str], ray_environment: None, small: Path, tmp_path: Path
) -> None:
    given = [word for setting in (*settings, "algorithm.rounds=100000") for word in ("--set", setting)]
    command = [sys.executable, "-m", "shoal", "run", str(small), "--ray", *given]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        assert any(line.startswith("round") for line in running.stdout)
        started = psutil.Process(running.pid).children(recursive=True)
        assert any("raylet" in process.name() for process in started)
        os.killpg(running.pid, signal.SIGINT)
        running.stdout.read()
        assert running.wait(30) == 130
    assert wait_until(lambda: not any(process.is_running() for process in started))
    (summary,) = tmp_path.glob("runs/*/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "interrupted"


def test_ray_and_other_agents_are_an_error(shoal: Callable[..., CommandResult], small: Path) -> None:
    result = shoal("run", small, "--ray", "--engine", "processes", "--agents", "127.0.0.1:7700")
    assert result.code == 2
    assert "choose --ray, or --agents and --listen" in result.err


@pytest.mark.parametrize(
    ("address", "error"),
    [("127.0.0.1:1", "cannot connect to Ray at '127.0.0.1:1'"), ("somewhere", "expected 'auto', HOST:PORT")],
)
def test_a_wrong_address_is_an_error(
    address: str, error: str, ray_environment: None, shoal: Callable[..., CommandResult], small: Path
) -> None:
    result = shoal("run", small, "--ray", address)
    assert result.code == 2
    assert error in result.err


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExperimentError, match=r"pip install 'shoal\[ray\]'"):
        experiment().run(tmp_path)


# Experiments


def test_workers_on_ray_train_on_cpus() -> None:
    with pytest.raises(ExperimentError, match=r"training.device = 'cuda': workers on Ray train on CPUs"):
        experiment(training={"device": "cuda"})
