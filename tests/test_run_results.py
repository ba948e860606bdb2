"""What `Experiment.run` reports while it goes on, and the results of a run in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.data.digits import Digits
from shoal.errors import DataError
from shoal.results.monitor import RunMonitor
from shoal.results.records import Evaluation, Round

ENGINES = ("simulation", "processes")
QUICK: dict[str, Any] = {
    "name": "quick",
    "nodes": 4,
    "algorithm": {"name": "dpsgd", "rounds": 4},
    "evaluation": {"every": 2},
    "simulation": {"batching": "off"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> shoal.Run:
    return shoal.Experiment(**QUICK).run(tmp_path_factory.mktemp("folder") / "runs")


# Progress and callbacks


@pytest.mark.parametrize("name", ["on_round", "on_evaluation"])
def test_a_callback_that_is_no_function_is_an_error_before_the_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"{name} = 3: expected a function"):
        shoal.Experiment(**QUICK).run(tmp_path, **{name: 3})
    assert not list(tmp_path.iterdir())


CRASH = {"fault": [{"nodes": "3", "kind": "crash", "round": 1}]}


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("simulation", {}),
        ("simulation", CRASH),
        ("processes", CRASH),
        ("simulation", {"evaluation": {"every": 2, "nodes": 2}}),
    ],
)
def test_rounds_and_evaluations_are_reported_in_this_process(
    engine: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    rounds: list[shoal.RoundReport] = []
    evaluations: list[shoal.EvaluationReport] = []
    done = shoal.Experiment(**{**QUICK, **settings}, engine=engine).run(
        tmp_path, on_round=rounds.append, on_evaluation=evaluations.append
    )
    records = list(done.folder.read_all())
    assert [report.round for report in rounds] == [0, 1, 2, 3]
    for report in rounds:
        own = [r for _, r in records if isinstance(r, Round) and r.round == report.round]
        assert report.nodes == len(own)
        assert report.loss == pytest.approx(np.mean([r.loss for r in own if r.loss is not None]))
        assert report.time == max(r.time for r in own)
        assert report.bytes_sent == sum(r.bytes_sent for r in own)
    assert [report.round for report in evaluations] == [1, 3]
    for evaluation in evaluations:
        scores = {n: r.scores for n, r in records if isinstance(r, Evaluation) and r.round == evaluation.round}
        assert evaluation.by_node == scores
        assert evaluation.scores["accuracy"] == pytest.approx(np.mean([own["accuracy"] for own in scores.values()]))


@given(st.permutations([node for node in range(3) for _ in range(4)]), st.integers(1, 12))
def test_a_round_is_reported_once_when_the_last_node_has_finished_it(order: list[int], batch: int) -> None:
    """`order` is the node of each record; `batch` records are read at once."""
    finished, reports = [0, 0, 0], list[shoal.RoundReport]()
    monitor = RunMonitor(on_round=reports.append)
    monitor.expect(range(3), (), ())
    for start in range(0, len(order), batch):
        records = []
        for node in order[start : start + batch]:
            records.append((node, Round(finished[node], float(finished[node]), float(node), 10, 1)))
            finished[node] += 1
        monitor.add_records(records)
        assert [report.round for report in reports] == list(range(min(finished)))
    assert all((report.nodes, report.loss, report.bytes_sent) == (3, 1.0, 30) for report in reports)


def test_with_a_server_its_model_is_reported(tmp_path: Path) -> None:
    found: list[shoal.EvaluationReport] = []
    settings = {**QUICK, "algorithm": {"name": "fedavg", "rounds": 4}}
    shoal.Experiment(**settings).run(tmp_path, on_evaluation=found.append)
    assert [(report.round, list(report.by_node)) for report in found] == [(1, [4]), (3, [4])]


def test_evaluations_by_the_clock_are_reported(tmp_path: Path) -> None:
    found: list[shoal.EvaluationReport] = []
    settings = {**QUICK, "evaluation": {"seconds": 0.015}}
    done = shoal.Experiment(**settings).run(tmp_path, on_evaluation=found.append)
    times = [report.time for report in found]
    assert times == pytest.approx([0.015, 0.03, 0.04])
    assert all(len(report.by_node) == 4 for report in found)
    assert done.summary["accuracy"]["mean"] == pytest.approx(found[-1].scores["accuracy"])


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_of_a_callback_ends_the_run_and_is_raised(engine: str, tmp_path: Path) -> None:
    class EnoughError(Exception):
        """The user has seen enough."""

    def stop(report: shoal.RoundReport) -> None:
        raise EnoughError(f"round {report.round}")

    endless = {**QUICK, "algorithm": {"name": "dpsgd", "rounds": 100_000}, "engine": engine}
    with pytest.raises(EnoughError, match="round 0"):
        shoal.Experiment(**endless).run(tmp_path, on_round=stop)
    assert shoal.open_run(tmp_path).status == "failed"


def test_progress_is_printed_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shoal.Experiment(**QUICK).run(tmp_path)
    assert not capsys.readouterr().out
    done = shoal.Experiment(**QUICK).run(tmp_path, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loading 4 nodes"
    assert lines[-2].startswith("round ")
    assert "accuracy 0." in lines[-2]
    assert lines[-1] == repr(done)


# Results


def test_the_short_text_counts_diverged_nodes(tmp_path: Path) -> None:
    run = shoal.Experiment(**{**QUICK, "training": {"lr": 1e30}}).run(tmp_path)
    assert len(run.summary["diverged"]) > 1
    assert repr(run).endswith(f", {len(run.summary['diverged'])} nodes diverged>")


def test_a_run_has_records_a_figure_and_a_short_text(run: shoal.Run) -> None:
    assert "\n" not in repr(run)
    assert f"{run.folder.path}: completed, 4 rounds, accuracy {run.summary['accuracy']['mean']:.4f}" in repr(run)
    rounds = run.table.filter(np.array(run.table["kind"].to_pylist()) == "round")
    assert sorted(set(rounds["round"].to_pylist())) == [0, 1, 2, 3]
    figure = run.plot()
    assert isinstance(figure, Figure)
    assert figure.axes[0].get_ylabel() == "test accuracy"
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert run.plot("loss", x="bytes").axes[0].get_xlabel().startswith("sent by all nodes [")


def test_a_plot_of_an_unknown_metric_or_axis_is_rejected(run: shoal.Run) -> None:
    with pytest.raises(
        DataError, match=r"^'acuracy' was not measured; the records have accuracy, loss, .*; did you mean 'accuracy'"
    ):
        run.plot("acuracy")
    with pytest.raises(DataError, match=r"^x = 'byte'; expected one of 'rounds', 'time', 'bytes'"):
        run.plot(x="byte")  # type: ignore[arg-type]


def test_metrics_are_a_data_frame_or_an_error_that_names_the_extra(run: shoal.Run) -> None:
    try:
        import pandas
    except ImportError:
        with pytest.raises(DataError, match=r"pip install 'shoal\[pandas\]'; run.table has the same"):
            _ = run.metrics
    else:
        assert isinstance(run.metrics, pandas.DataFrame)
        assert len(run.metrics) == run.table.num_rows


def test_a_finished_run_is_opened_by_its_folder_or_name(run: shoal.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.folder.path.parents[2])
    for path in (run.folder, run.folder.path, "runs", "quick"):
        opened = shoal.open_run(path)
        assert opened.folder.path.samefile(run.folder.path)
        assert opened.summary == run.summary
        assert opened.experiment == run.experiment
    with pytest.raises(DataError, match="there is no run in 'slow'"):
        shoal.open_run("slow")


def test_the_version(shoal: Callable[..., Any]) -> None:
    import shoal as package

    result = shoal("--version")
    assert (result.code, result.out.strip()) == (0, f"shoal {package.__version__}")


# Final models

MODULES = """
from torch import nn


class Everything(nn.Module):
    '''Tied, frozen and trained parameters, running statistics and a constant buffer.'''

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.second(self.first(self.norm(self.frozen(x)).relu()).relu()))
"""


def accuracy(module: nn.Module) -> float:
    test = Digits().load(0).test
    with torch.no_grad():
        return float((module(torch.tensor(test.x)).argmax(1).numpy() == test.y).mean())


def test_a_final_model_is_loaded_without_shoal_and_has_the_accuracy_of_the_summary(
    tmp_path: Path, shoal: Callable[..., Any]
) -> None:
    import shoal as package

    (tmp_path / "modules.py").write_text(MODULES)
    settings = {**QUICK, "model": {"name": "modules.py:Everything"}, "base": tmp_path}
    run = package.Experiment(**settings).run("runs")
    (tmp_path / "modules.py").unlink()  # the run has a copy
    by_node = [list(run.folder.read(node))[-2] for node in range(4)]
    built: dict[str, Any] = {}
    exec(MODULES, built)
    for node in (3, "average"):
        result = shoal("export-model", "quick", "--node", node, "out.safetensors")
        assert result.code == 0, result.err
        module = built["Everything"]()
        module.load_state_dict(load_file("out.safetensors"), strict=True)
        found = accuracy(module.eval())
        expected = run.summary["averaged_model"] if node == "average" else by_node[node].scores  # type: ignore[union-attr,index]
        assert found == pytest.approx(expected["accuracy"])
        own = run.model(node)  # type: ignore[arg-type]
        assert not own.training
        assert accuracy(own) == found
    with safe_open("out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["shape"] == "[64]"
    assert "modules.py:Everything" in metadata["model"]
    assert metadata["averaged_nodes"] == "4"
    assert "4 of 4 nodes, averaged" in result.out


def test_an_average_over_no_training_node_is_an_error(tmp_path: Path) -> None:
    run = shoal.Experiment(**{**QUICK, "algorithm": {"name": "fedavg", "rounds": 1}}).run(tmp_path)
    for node in range(4):
        run.folder.model(node).unlink()
    with pytest.raises(DataError, match=r"no final model of a training node to average.*of the nodes \[4\]"):
        run.model()


def test_a_model_that_has_changed_since_the_run_is_an_error_with_both_sizes(run: shoal.Run) -> None:
    changed = shoal.Experiment(**QUICK, model={"name": "logistic"})
    with pytest.raises(DataError, match=r"'logistic' has 650 parameters, and the final models of the run have 4810"):
        shoal.Run(run.folder, run.summary, changed).model()


def test_the_name_of_a_file_has_the_format(run: shoal.Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.pt': expected a name that ends in \.safetensors"):
        run.save_model(tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_an_error_and_nothing_is_left(run: shoal.Run, tmp_path: Path) -> None:
    (tmp_path / "taken.safetensors").mkdir()
    with pytest.raises(DataError, match=r"cannot write '.*taken.safetensors': Is a directory; choose another file"):
        run.save_model(tmp_path / "taken.safetensors")
    with pytest.raises(DataError, match=r"cannot write '/proc/.*'"):
        run.save_model("/proc/model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.safetensors"]


def test_statistics_that_a_node_keeps_for_itself_come_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "modules.py").write_text(MODULES)
    settings = {"model": {"name": "modules.py:Everything"}, "training": {"buffers": "local"}, "base": tmp_path}
    run = shoal.Experiment(**QUICK, **settings, checkpoint={"every": 2}).run(tmp_path)
    for node in range(4):
        last = list(run.folder.read(node))[-2]
        assert isinstance(last, Evaluation)
        assert accuracy(run.model(node)) == pytest.approx(last.scores["accuracy"])


def test_a_model_can_be_trained_further(run: shoal.Run) -> None:
    module = run.model(0).train()
    loss = nn.functional.cross_entropy(module(torch.zeros(2, 64)), torch.tensor([1, 2]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("settings", "node", "text"),
    [
        ({}, "3", "no final model of node '3': there is no such node; expected 'average' or a number from 0 to 3"),
        ({}, 9, "no final model of node 9: there is no such node; expected 'average' or a number from 0 to 3"),
        ({"checkpoint": {"final": False}}, 0, "has no final models: checkpoint.final = false; set it to true"),
        (CRASH, 3, "of node 3: it failed: crashed on schedule"),
        ({"trainer": {"name": "scikit"}}, 0, "trainer = 'scikit' has no torch module; the parameters of node i are in"),
        (
            {"model": {"name": "modules.py:Everything"}, "training": {"buffers": "local"}},
            0,
            "node 0 has statistics of its own (norm.running_mean, …), and a run stores them in checkpoints only",
        ),
    ],
    ids=["text", "unknown", "not written", "failed", "no module", "local statistics"],
)
def test_models_that_a_run_does_not_have(settings: dict[str, Any], node: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.py").write_text(MODULES)
    quick = {**QUICK, "algorithm": {"name": "dpsgd", "rounds": 2}, "base": tmp_path}
    run = shoal.Experiment(**{**quick, **settings}).run(tmp_path)
    with pytest.raises(DataError) as raised:
        run.model(node)
    assert text in str(raised.value)
