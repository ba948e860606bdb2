"""A run that is resumed from a checkpoint ends like a run that was not interrupted, in the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from checkpoint_runs import comparable, experiment, records_of, stopped_after
from shoal.results.records import RESUMED, Event

DYNAMIC = {"name": "regular", "degree": 2, "dynamic": True}
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
    "dpsgd, overlapped": {"algorithm": {"name": "dpsgd", "overlap": True}},
    "momentum": {"training": {"lr": 0.1, "batch_size": 50, "momentum": 0.9, "local_steps": 3}},
    "adam": {"training": {"lr": 0.01, "batch_size": 50, "optimizer": "adam"}},
    "choco": {"sharing": {"name": "choco"}},
    "topk": {"sharing": {"name": "topk", "fraction": 0.2}},
    "random": {"sharing": {"name": "random", "fraction": 0.2}},
    "powergossip": {"sharing": {"name": "powergossip"}},
    "deepsqueeze": {"sharing": {"name": "deepsqueeze"}},
    "jwins": {"sharing": {"name": "jwins"}},
    "qsgd": {"sharing": {"name": "qsgd"}},
    "data": {"sharing": {"name": "data", "samples": 4}},
    "gradient tracking": {"algorithm": {"name": "gradient-tracking"}},
    "k-gt": {"algorithm": {"name": "k-gt"}},
    "d2": {"algorithm": {"name": "d2"}},
    "sgp": {"algorithm": {"name": "sgp"}, "topology": {"name": "one-peer-exponential"}},
    "qg-dsgdm": {"algorithm": {"name": "qg-dsgdm"}},
    "relaysum": {"algorithm": {"name": "relaysum"}, "topology": {"name": "tree"}},
    "muffliato": {"algorithm": {"name": "muffliato"}},
    "d-cliques": {"algorithm": {"name": "d-cliques", "size": 3}},
    "ipls": {"algorithm": {"name": "ipls"}},
    "shatter": {"algorithm": {"name": "shatter", "virtual_nodes": 3, "degree": 2}},
    "el-oracle": {"algorithm": {"name": "el-oracle", "degree": 2}},
    "el-local": {"algorithm": {"name": "el-local", "peers": 2}},
    "dynamic graph": {"topology": DYNAMIC},
    "peer sampler": {"topology": {"name": "peer-sampler", "graph": DYNAMIC}},
    "static peer sampler": {"topology": {"name": "peer-sampler", "graph": "ring"}},
    "fedavg": {"algorithm": {"name": "fedavg", "fraction": 0.5, "server": "adam"}},
    "fedavg, all clients": {"algorithm": {"name": "fedavg"}, "sharing": {"name": "topk", "fraction": 0.2}},
    "parameter server": {"algorithm": {"name": "parameter-server", "server": "momentum"}},
    "pool": {"simulation": {"batching": "pool", "workers": 2}, "training": {"momentum": 0.9}},
    "adam, vmap": {"simulation": {"batching": "vmap"}, "training": {"optimizer": "adam", "lr": 0.01}},
    "slow network": {"network": {"name": "uniform", "latency": 0.01, "upload": 1.0, "download": 1.0}},
    "devices of different speeds": {
        "speed": {"step_seconds": 0.1},
        "group": [{"nodes": "0-1", "speed": {"step_seconds": 0.35}}],
    },
    "evaluated by time": {"speed": {"step_seconds": 0.1}, "evaluation": {"seconds": 0.15}},
}
ROUNDS = 6

# As `torch.optim.LBFGS`, with one gradient per step: its state has lists of tensors, numbers and None.
QUASI_NEWTON = """
import torch

class QuasiNewton(torch.optim.LBFGS):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, max_iter=1, history_size=4)

    def step(self, closure=None):
        super().step(lambda: torch.tensor(0.0))
        first = self._params[0]
        past = self.state[first].setdefault("past", {0: (first.detach().clone(), 0.1), "none": None})
        assert isinstance(past[0], tuple)
        first.data.lerp_(*past[0])
        past[0] = (first.detach().clone(), 0.2)
"""


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_resumed_run_ends_like_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    settings = {**SYNCHRONOUS[name]}
    settings["algorithm"] = {"name": "dpsgd", **settings.get("algorithm", {}), "rounds": ROUNDS}
    whole = experiment(**settings).run(tmp_path / "whole")
    for round in (0, 2, ROUNDS - 1):
        resumed = shoal.resume(stopped_after(whole.folder, round, tmp_path / f"after {round}").path)
        assert resumed.summary["digest"] == whole.summary["digest"]
        assert comparable(resumed.summary) == comparable(whole.summary)
        assert resumed.summary["time"]["virtual_s"] == whole.summary["time"]["virtual_s"]
        times = name != "static peer sampler"  # it begins again, and sends the neighbours at the time of the checkpoint
        spans = name != "fedavg"  # a client waits at the checkpoint: its records have only the wait after it
        assert records_of(resumed.folder, times, spans) == records_of(whole.folder, times, spans)
        assert list(resumed.folder.read_averages()) == list(whole.folder.read_averages())
        assert resumed.summary["events"][RESUMED] >= 6


@pytest.mark.parametrize("batching", ["off", "pool"])
def test_an_optimizer_with_lists_in_its_state_continues_from_a_checkpoint(batching: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(QUASI_NEWTON)
    whole = experiment(
        algorithm={"name": "dpsgd", "rounds": ROUNDS},
        training={"optimizer": "own.py:QuasiNewton", "lr": 0.05, "batch_size": 50, "local_steps": 2},
        simulation={"batching": batching, "workers": 2},
        base=tmp_path,
    ).run(tmp_path / "whole")
    resumed = shoal.resume(stopped_after(whole.folder, 2, tmp_path / "stopped").path)
    assert resumed.summary["digest"] == whole.summary["digest"]
    assert not resumed.summary["diverged"]


@pytest.mark.parametrize(
    ("algorithm", "inner"),
    [("dpsgd", "full"), ("dpsgd", "random"), ("dpsgd", "topk"), ("fedavg", "full"), ("fedavg", "random")],
)
def test_secure_aggregation_agrees_on_new_keys_and_ends_with_the_same_models(
    inner: str, algorithm: str, tmp_path: Path
) -> None:
    whole = experiment(
        sharing={"name": "secure", "inner": inner},
        algorithm={"name": algorithm, "rounds": ROUNDS},
        topology={"name": "full"},
    ).run(tmp_path)
    resumed = shoal.resume(stopped_after(whole.folder, 2, tmp_path / "stopped").path)
    assert resumed.summary["digest"] == whole.summary["digest"]
    assert resumed.summary["rounds"] == ROUNDS


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "adpsgd": {"algorithm": {"name": "adpsgd"}},
    "swift": {"algorithm": {"name": "swift"}},
    "divshare": {"algorithm": {"name": "divshare"}},
    "gossip": {"algorithm": {"name": "gossip"}, "topology": {"name": "full"}},
    "adpsgd-artifact": {"algorithm": {"name": "adpsgd-artifact"}},
    "swift-artifact": {"algorithm": {"name": "swift-artifact"}},
    "asynchronous parameter server": {"algorithm": {"name": "parameter-server", "asynchronous": True}},
    "gossip sampler": {"algorithm": {"name": "dpsgd"}, "topology": {"name": "gossip-sampler", "degree": 1}},
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_nodes_go_on_without_the_messages_in_transit(name: str, tmp_path: Path) -> None:
    settings = {
        "speed": {"step_seconds": 0.1},
        "group": [{"nodes": "0-1", "speed": {"step_seconds": 0.35}}],
        "network": {"name": "uniform", "latency": 0.02, "upload": 10.0, "download": 10.0},
        "evaluation": {"seconds": 0.2},
        **ASYNCHRONOUS[name],
    }
    settings["algorithm"] = {**settings["algorithm"], "rounds": 8}
    whole = experiment(**settings).run(tmp_path / "whole")
    resumed = shoal.resume(stopped_after(whole.folder, 3, tmp_path / "stopped").path)
    assert resumed.status == "completed"
    assert resumed.summary["rounds"] == 8
    times = [record.time for _, record in resumed.folder.read_all()]
    assert max(times) <= 1.5 * whole.summary["time"]["virtual_s"]
    for node in range(6):
        ticks = [r.tick for r in resumed.folder.read(node) if getattr(r, "tick", None) is not None]
        assert ticks == sorted(set(ticks)), "each evaluation once"
        assert ticks == list(range(1, len(ticks) + 1)), "no evaluation is missing"
    notes = [r.detail for _, r in resumed.folder.read_all() if isinstance(r, Event) and r.what == RESUMED]
    assert len(notes) >= 6
    by_time = name != "gossip sampler"  # its nodes wait for each other
    assert all(("messages in transit at the checkpoint are lost" in note) == by_time for note in notes)
