"""`Experiment.run`: warnings, and the experiment that is written to the run's folder."""

from __future__ import annotations

import os
import signal
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from shoal.experiment import Experiment, running
from shoal.results.progress import NullProgressListener, Progress
from shoal.topologies import TopologyWarning

UNEVEN: dict[str, Any] = {
    "name": "uneven",
    "nodes": 5,  # a ring of an odd number of nodes is not bipartite
    "algorithm": {"name": "adpsgd", "rounds": 1},
    "topology": {"name": "ring"},
    "model": {"name": "logistic"},
    "evaluation": {"every": 0},
}
WARNING = "1 of its 5 links are dropped"


def test_a_warning_is_given_once_from_python(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Experiment(**UNEVEN).run(tmp_path)
    found = [str(warning.message) for warning in caught if issubclass(warning.category, TopologyWarning)]
    assert len(found) == 1
    assert WARNING in found[0]


def test_a_warning_is_shown_once_on_the_command_line(shoal: Callable[..., Any]) -> None:
    Path("uneven.toml").write_text(tomli_w.dumps(UNEVEN))
    result = shoal("run", "uneven.toml")
    assert result.code == 0
    assert result.out.count(WARNING) == 1


def test_the_written_experiment_names_the_batching_that_was_chosen(tmp_path: Path) -> None:
    experiment = Experiment(nodes=2, algorithm={"name": "dpsgd", "rounds": 1}, model={"name": "logistic"})
    assert experiment.simulation.batching == "auto"
    run = experiment.run(tmp_path)
    written = tomllib.loads(run.folder.experiment.read_text())
    assert written["simulation"]["batching"] == run.summary["batching"] != "auto"
    assert Experiment.from_table(written).simulation.batching == run.summary["batching"]


class InterruptsOnce(NullProgressListener):
    """Sends SIGTERM to this process at the first progress of a run."""

    interrupted = False

    def progress(self, progress: Progress) -> None:
        if not self.interrupted:
            self.interrupted = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_interrupts_a_run_of_a_test_ends_the_tests(tmp_path: Path) -> None:
    """The run handles it: without its own check, the test would look for models that were not written."""
    with pytest.raises(pytest.exit.Exception, match="signal 15 interrupted the run"):
        running.run(Experiment(nodes=2, engine="processes"), tmp_path, InterruptsOnce())
    (folder,) = tmp_path.glob("*/*/checkpoints")
    assert not list(folder.iterdir())
