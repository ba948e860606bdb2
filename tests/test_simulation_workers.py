"""Workers of the simulation: what they compute does not depend on how fast they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkpoint_runs import stopped_after
from conftest import models_of
from random_data import CLASSES, DATA, PART
from shoal import resume
from shoal.engines.simulation import workers as workers_module
from shoal.engines.simulation.compute import SequentialExecutor, WorkItem
from shoal.engines.simulation.workers import WorkerExecutor
from shoal.engines.stacking import STACK_SIZE
from shoal.engines.worker import Command, Replies, Rows, compute
from shoal.errors import NodeError
from shoal.experiment import Experiment
from shoal.models.flat import FlatModule
from shoal.training.learner import Learner
from shoal.training.settings import Training
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import Evaluate, Train, Trainer
from shoal.types import Params

NODES = 8


class InProcess:
    """A worker in this process. `ready` lists the answers to whether it is ready, as if it were a busy process."""

    external = False

    def __init__(self, trainers: Sequence[Trainer], stacked: bool, ready: Sequence[bool] = ()) -> None:
        self._trainers = dict(enumerate(trainers))
        self._stacked = stacked
        self._ready = list(ready)
        self._sent: tuple[list[Command], Rows] | None = None
        self.batches: list[list[int]] = []
        """The nodes of each batch."""

    def send(self, commands: Sequence[Command], params: Sequence[Params]) -> None:
        assert self._sent is None, "requests and replies alternate"
        self.batches.append([command.node for command in commands])
        self._sent = list(commands), np.stack(params) if params else np.zeros((len(commands), 0), np.float32)

    def has_reply(self, timeout: float = 0.0) -> bool:
        assert self._sent is not None
        return timeout > 0 or (self._ready.pop(0) if self._ready else True)

    def receive(self) -> tuple[Replies, Rows]:
        assert self._sent is not None
        (commands, rows), self._sent = self._sent, None
        return compute(self._trainers, commands, rows, self._stacked), rows

    def close(self) -> None:
        self._trainers = {}


def trainers() -> list[TorchTrainer]:
    """Trainers with momentum, so that the order of a node's trainings matters."""
    learner = Learner(FlatModule(nn.Linear(6, CLASSES)), Training(batch_size=4, options={"momentum": 0.9}), DATA)
    return [TorchTrainer(learner, PART, np.random.default_rng(node), 0.0) for node in range(NODES)]


STEPS = st.lists(
    st.tuples(st.sampled_from(["submit", "submit", "submit", "finish", "discard"]), st.integers(0, NODES - 1)),
    min_size=10,
    max_size=40,
)
READY = st.lists(st.booleans(), min_size=10, max_size=30)


def carry_out(executor: Any, made: Sequence[TorchTrainer], steps: Sequence[tuple[str, int]]) -> list[Any]:
    """Let nodes train and evaluate in this order: each node submits its next work when it has finished the last."""
    start = np.zeros(made[0].learner.flat.size, np.float32)
    params, items, results = [start] * NODES, {}, []
    crashed: set[int] = set()
    for what, node in [*steps, *(("finish", node) for node in range(NODES))]:
        if what == "submit" and node not in items and node not in crashed:
            work = (Evaluate if len(results) % 3 == 2 else Train)(made[node], params[node])
            items[node] = WorkItem(work)
            executor.submit(items[node])
        elif what == "finish" and node in items:
            item = items.pop(node)
            executor.finish(item)
            assert item.done
            if isinstance(item.work, Train):
                params[node] = item.result.params
                assert not params[node].flags.writeable
            results.append((node, item.result if isinstance(item.work, Evaluate) else params[node]))
        elif what == "discard" and node in items:
            executor.discard(items.pop(node))
            crashed.add(node)
    return results


def assert_equal(found: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> None:
    assert [node for node, _ in found] == [node for node, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        if isinstance(one, dict):
            assert one == pytest.approx(other, abs=tolerance)
        else:
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@given(steps=STEPS, stacked=st.booleans(), count=st.integers(1, 3), data=st.data())
@settings(max_examples=60)
def test_workers_of_any_speed_give_the_results_of_a_sequence(
    steps: list[tuple[str, int]], stacked: bool, count: int, data: st.DataObject
) -> None:
    wanted = carry_out(SequentialExecutor(), trainers(), steps)
    made = trainers()
    ready = [data.draw(READY) for _ in range(count)]
    executor = WorkerExecutor(made, [InProcess(made, stacked, r) for r in ready], stacked)
    assert_equal(carry_out(executor, made, steps), wanted, 1e-6 if stacked else 0.0)


@given(steps=STEPS, data=st.data())
@settings(max_examples=40)
def test_which_nodes_are_in_a_stack_does_not_depend_on_the_speed_of_workers(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers_module, "STACK_SIZE", 3)
        batches = []
        for _ in range(2):
            made = trainers()
            workers = [InProcess(made, True, data.draw(READY)) for _ in range(2)]
            carry_out(WorkerExecutor(made, workers, stacked=True), made, steps)
            batches.append([worker.batches for worker in workers])
    assert batches[0] == batches[1]


def test_a_free_worker_begins_before_a_result_is_needed() -> None:
    made = trainers()
    worker = InProcess(made, stacked=False)
    executor = WorkerExecutor(made, [worker])
    start = made[0].learner.flat.read()
    executor.submit(WorkItem(Train(made[3], start)))
    assert worker.batches == [[3]]


def test_a_failure_in_a_stack_is_reported_with_its_traceback() -> None:
    made = trainers()
    executor = WorkerExecutor(made, [InProcess(made, stacked=True)], stacked=True)
    item = WorkItem(Train(made[0], np.zeros(3, np.float32)))
    executor.submit(item)
    with pytest.raises(NodeError, match=r"training failed in a worker process:\nTraceback"):
        executor.finish(item)


# Real workers


def many(**changed: Any) -> Experiment:
    """As many nodes as two workers stack."""
    return Experiment(
        nodes=2 * STACK_SIZE + 20,
        algorithm={"name": "dpsgd", "rounds": 3},
        topology={"name": "regular", "degree": 3},
        dataset={"name": "synthetic", "shape": [6], "samples": 8 * (2 * STACK_SIZE + 20), "test_samples": 20},
        model="logistic",
        training={"batch_size": 4, "options": {"momentum": 0.9}},
        evaluation={"every": 2, "nodes": 5},
        simulation={"batching": "vmap", **changed.pop("simulation", {})},
        **changed,
    )


def test_stacking_in_workers_gives_the_models_of_one_process_again_and_again(tmp_path: Path) -> None:
    alone = many(simulation={"workers": 1}).run(tmp_path / "alone")
    first, second = (many(simulation={"workers": 2}).run(tmp_path / name) for name in ("first", "second"))
    assert first.summary["digest"] == second.summary["digest"]
    assert first.summary["batching"] == "vmap"
    np.testing.assert_allclose(models_of(first), models_of(alone), rtol=0, atol=1e-6)
    assert first.summary["bytes_sent"] == alone.summary["bytes_sent"]
    assert first.summary["time"]["train_cpu_s"] > 0


def test_a_simulation_with_stacking_workers_continues_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"simulation": {"workers": 2}, "checkpoint": {"every": 1}}
    whole = many(**options).run(tmp_path / "whole")
    folder = stopped_after(whole.folder, 1, tmp_path / "stopped")
    resumed = resume(folder.path)
    np.testing.assert_allclose(models_of(resumed), models_of(whole), rtol=0, atol=1e-6)
