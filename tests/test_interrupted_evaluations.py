"""Interrupts of runs whose nodes evaluate models after the run, and errors in such evaluations."""

from __future__ import annotations

import signal
import textwrap
import time
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
    import asyncio
    import time
    from typing import ClassVar

    from shoal import Traits
    from shoal.engines.processes import node_run


    def evaluate_slowly(node):
        evaluate = node.trainer.evaluate

        def evaluate_and_count(params):
            with Path(f"evaluated-by-{node.id}").open("a") as file:
                file.write("x")
            time.sleep(0.3)
            return evaluate(params)

        node.trainer.evaluate = evaluate_and_count


    class SlowEvaluation(Held):
        async def run(self, node):
            evaluate_slowly(node)
            await super().run(node)


    class HastyExit(SlowEvaluation):
        async def run(self, node):
            node_run.STOP_EVALUATION_SECONDS = 0.0
            await super().run(node)


    class BlockedServer(Held):
        traits: ClassVar[Traits] = Traits(has_service=True)

        async def serve(self, node):
            evaluate_slowly(node)
            async for _ in node.rounds(self.rounds):
                pass
            while not Path("unblocked").exists():
                time.sleep(0.02)  # messages of the coordinator wait as well
            await asyncio.Event().wait()


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
            assert rounds == list(range(ROUNDS)), node
            assert (tmp_path / f"evaluated-by-{node}").stat().st_size == ROUNDS
        assert ends(run.folder) == set(range(NODES))


def test_an_interrupt_during_the_last_evaluations_evaluates_the_latest_model(tmp_path: Path) -> None:
    (tmp_path / "hasty.py").write_text(SLOW)
    algorithm = f"algorithm={{name='hasty.py:HastyExit', rounds={ROUNDS}, held={ROUNDS}}}"
    with started(tmp_path, SHAPED, EVERY_ROUND, algorithm) as run:
        until(lambda: any(isinstance(r, Evaluation) for node in range(NODES) for r in run.folder.read(node)))
        run.process.send_signal(signal.SIGINT)
        code, out = run.end()
        assert code == 130, out
        for node in range(NODES):
            rounds = [r.round for r in run.folder.read(node) if isinstance(r, Evaluation)]
            assert rounds == sorted(set(rounds)), node
            assert rounds[-1] == ROUNDS - 1, node


def test_a_service_that_is_stopped_as_the_run_finishes_evaluates_each_model_once(tmp_path: Path) -> None:
    (tmp_path / "blocked.py").write_text(SLOW)
    algorithm = f"algorithm={{name='blocked.py:BlockedServer', rounds={ROUNDS}, held={ROUNDS}}}"
    with started(tmp_path, SHAPED, EVERY_ROUND, algorithm) as run:
        until(lambda: ends(run.folder) == set(range(NODES)))
        run.process.send_signal(signal.SIGINT)
        until(lambda: "stopping:" in run.output)
        time.sleep(0.5)  # until the message to stop has been sent
        (tmp_path / "unblocked").touch()
        code, out = run.end()
        assert code == 130, out
        assert (tmp_path / f"evaluated-by-{NODES}").stat().st_size == ROUNDS
        assert [r.round for r in run.folder.read(NODES) if isinstance(r, Evaluation)] == list(range(ROUNDS))


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
