"""Interrupts of runs whose nodes evaluate models after the run, and errors in such evaluations."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from conftest import until
from process_runs import HELD, NODES, ROUNDS, ends, started
from shoal.results.records import Evaluation

pytestmark = pytest.mark.usefixtures("no_process_is_left")

SHAPED = "network={name='uniform', latency=0.01}"
EVERY_ROUND = "evaluation={every=1, samples=20, average=false}"
SLOW = HELD + textwrap.dedent(
    """
    import time


    class SlowEvaluation(Held):
        async def run(self, node):
            evaluate = node.trainer.evaluate

            def evaluate_slowly(params):
                time.sleep(0.3)
                return evaluate(params)

            node.trainer.evaluate = evaluate_slowly
            await super().run(node)


    class FailingEvaluation(Held):
        async def run(self, node):
            def fail(params):
                raise ZeroDivisionError("this model cannot be evaluated")

            node.trainer.evaluate = fail
            await super().run(node)
    """
)


def test_an_interrupt_during_the_last_evaluations_records_each_of_them_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    algorithm = f"algorithm={{name='slow.py:SlowEvaluation', rounds={ROUNDS}, held={ROUNDS}}}"
    with started(tmp_path, SHAPED, EVERY_ROUND, algorithm) as run:
        evaluated = lambda: {n for n in range(NODES) if any(isinstance(r, Evaluation) for r in run.folder.read(n))}  # noqa: E731
        until(lambda: evaluated() and run.process.poll() is None)
        run.process.send_signal(signal.SIGINT)
        code, out = run.end()
        assert code == 130, out
        assert run.summary["status"] == "interrupted"
        for node in range(NODES):
            rounds = [r.round for r in run.folder.read(node) if isinstance(r, Evaluation)]
            assert rounds == list(range(len(rounds))), node
            assert rounds, node
        assert ends(run.folder) == set(range(NODES))


def test_an_error_in_the_evaluation_after_an_interrupt_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(SLOW)
    algorithm = f"algorithm={{name='failing.py:FailingEvaluation', rounds={ROUNDS}, held=1}}"
    with started(tmp_path, SHAPED, EVERY_ROUND, algorithm) as run:
        run.wait_for_round(0)
        run.process.send_signal(signal.SIGINT)
        code, out = run.end()
        assert code == 130, out
        assert "ZeroDivisionError: this model cannot be evaluated" in run.folder.log.read_text()
        assert all(run.folder.model(node).exists() for node in range(NODES))
