"""The start of a run with processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from conftest import is_zygote, until
from shoal.engines.processes.launch import run_processes
from shoal.experiment import Experiment
from shoal.results.records import RunFolder

pytestmark = pytest.mark.usefixtures("no_process_is_left")


class InterruptingPath(type(Path())):  # type: ignore[misc]
    """A folder that is used before the first request to the agent: two signals arrive at that moment."""

    def resolve(self, strict: bool = False) -> Path:
        children = psutil.Process().children(recursive=True)
        if any(is_zygote(child) for child in children):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            until(lambda: not any(is_zygote(child) for child in children))
        return Path(super().resolve(strict))


def test_two_signals_before_the_first_request_to_the_agent_interrupt_the_run(tmp_path: Path) -> None:
    experiment = Experiment(nodes=2, engine="processes", base=InterruptingPath(tmp_path))
    outcome = run_processes(experiment, RunFolder.create(tmp_path, "interrupted"))
    assert outcome.status == "interrupted"
    assert outcome.facts["signal"] == signal.SIGINT
