"""`shoal export`: runs in TensorBoard, MLflow and Weights & Biases, read back with the libraries of the targets."""

from __future__ import annotations

import json
import math
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import shoal as package
from shoal.results.exports import points as export_points
from shoal.results.exports.follow import export_run
from shoal.results.records import Average, Evaluation, Record, RecordFile, Round, RunFolder
from shoal.results.run_lock import lock
from wandb_files import read_wandb_file

EXPERIMENT = {
    "name": "quick",
    "nodes": 4,
    "seed": 1,
    "algorithm": {"name": "dpsgd", "rounds": 4},
    "dataset": "digits",
    "evaluation": {"every": 2},
    "simulation": {"batching": "off"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that has ended."""
    return package.Experiment(**EXPERIMENT).run(tmp_path_factory.mktemp("runs")).folder


@pytest.fixture
def copy(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the run, which a test may damage."""
    path = tmp_path / "copies" / "quick" / finished.path.name
    shutil.copytree(finished.path, path)
    return RunFolder(path)


def expected_curves(folder: RunFolder) -> dict[str, dict[int, float]]:
    """The curves of a run by step, computed from its records."""
    losses: dict[int, list[float]] = defaultdict(list)
    scores: dict[int, list[float]] = defaultdict(list)
    for _, record in folder.read_all():
        if isinstance(record, Round) and record.loss is not None:
            losses[record.round + 1].append(record.loss)
        elif isinstance(record, Evaluation):
            scores[record.round + 1].append(record.scores["accuracy"])
    averages = [record for record in folder.read_averages() if isinstance(record, Average)]
    return {
        "train_loss": {step: sum(found) / len(found) for step, found in losses.items()},
        "accuracy/mean": {step: sum(found) / len(found) for step, found in scores.items()},
        "accuracy/min": {step: min(found) for step, found in scores.items()},
        "accuracy/max": {step: max(found) for step, found in scores.items()},
        "averaged_model/accuracy": {r.round + 1: r.scores["accuracy"] for r in averages},
        "consensus_distance": {r.round + 1: r.consensus_distance for r in averages},
        "node/2/accuracy": {
            r.round + 1: r.scores["accuracy"] for r in folder.read(2) if isinstance(r, Evaluation)
        },
    }  # fmt: skip


def tensorboard(path: Path) -> EventAccumulator:
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> dict[int, float]:
    found = events.Scalars(tag)
    steps = {event.step: event.value for event in found}
    assert len(steps) == len(found), f"{tag}: a step is there twice"
    return steps


def test_tensorboard_has_the_curves_the_experiment_and_the_summary(
    shoal: Callable[..., Any], finished: RunFolder, tmp_path: Path
) -> None:
    result = shoal("export", finished.path, "--to", "tensorboard", "--out", "logs", "--nodes", "2")
    assert result.code == 0, result.err
    folder = tmp_path / "logs" / "quick" / finished.path.name
    assert f"logs/quick/{finished.path.name}; show it with: tensorboard --logdir logs" in result.out
    events = tensorboard(folder)
    for tag, curve in expected_curves(finished).items():
        assert scalars(events, tag) == pytest.approx(curve), tag
    summary = finished.read_summary()
    assert scalars(events, "bytes_sent")[4] == summary["bytes_sent"]["total"]
    assert scalars(events, "messages_sent")[4] == summary["messages_sent"]
    assert scalars(events, "summary/accuracy/mean") == pytest.approx({4: summary["accuracy"]["mean"]})
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("node/") and not tag.startswith("node/2/")]
    text = events.Tensors("experiment")[0].tensor_proto.string_val[0].decode()
    assert 'name = "dpsgd"' in text
    assert "_hparams_/session_start_info" in events.summary_metadata
    times = [event.wall_time for event in events.Scalars("accuracy/mean")]
    recorded = sorted({r.time for r in finished.read(0) if isinstance(r, Evaluation)})
    assert times[-1] - times[0] == pytest.approx(recorded[-1] - recorded[0], abs=1e-3), "seconds of the run's clock"


@contextmanager
def closed_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a program of this test uses the network: its proxy is a port of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        yield
        with pytest.raises(BlockingIOError):
            server.accept()


def test_mlflow_has_the_curves_the_parameters_and_the_summary(
    shoal: Callable[..., Any], finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with closed_network(monkeypatch):
        result = shoal("export", finished.path, "--to", "mlflow", "--out", "store", "--nodes", "2")
    assert result.code == 0, result.err
    from mlflow import MlflowClient  # after the export, which must not depend on a setting of this test

    client = MlflowClient(f"sqlite:///{tmp_path}/store/mlflow.db")
    experiment = client.get_experiment_by_name("quick")
    [run] = client.search_runs([experiment.experiment_id])
    for name, curve in expected_curves(finished).items():
        history = client.get_metric_history(run.info.run_id, name)
        assert {metric.step: metric.value for metric in history} == pytest.approx(curve), name
        assert len(history) == len(curve), name
    assert run.data.params["algorithm.rounds"] == "4"
    assert run.data.params["dataset.name"] == "digits"
    assert run.data.tags["engine"] == "simulation"
    assert run.data.tags["status"] == "completed"
    assert (run.info.run_name, run.info.status) == (finished.path.name, "FINISHED")
    summary = finished.read_summary()
    assert run.data.metrics["summary/accuracy/mean"] == pytest.approx(summary["accuracy"]["mean"])
    artifacts = tmp_path / "store" / "artifacts" / "quick" / run.info.run_id / "artifacts"
    assert json.loads((artifacts / "summary.json").read_text())["digest"] == summary["digest"]

    again = shoal("export", finished.path, "--to", "mlflow", "--out", "store")
    assert again.code == 2
    assert f"already has this run, as the MLflow run {run.info.run_id}" in again.err
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_wandb_offline_has_the_curves_the_parameters_and_the_summary_and_uses_no_network(
    shoal: Callable[..., Any], finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with closed_network(monkeypatch):
        result = shoal("export", finished.path, "--to", "wandb", "--out", "offline", "--nodes", "2")
    assert result.code == 0, result.err
    [folder] = (tmp_path / "offline" / "wandb").glob("offline-run-*")
    assert f"wandb sync offline/wandb/{folder.name}" in result.out.replace(f"{tmp_path}/", "")
    [file] = folder.glob("*.wandb")
    written = read_wandb_file(file)
    for name, curve in expected_curves(finished).items():
        found = {row["step"]: row[name] for row in written.history if name in row}
        assert found == pytest.approx(curve), name
    assert written.config["algorithm.rounds"] == 4
    assert (written.project, written.name) == ("quick", finished.path.name)
    summary = finished.read_summary()
    assert written.summary["summary/accuracy/mean"] == pytest.approx(summary["accuracy"]["mean"])
    assert written.summary["status"] == "completed"

    again = shoal("export", finished.path, "--to", "wandb", "--out", "offline")
    assert again.code == 2
    assert f"offline/wandb/{folder.name} already has an export of this run" in again.err


def test_a_second_export_to_tensorboard_is_rejected(
    shoal: Callable[..., Any], finished: RunFolder, tmp_path: Path
) -> None:
    assert shoal("export", finished.path, "--to", "tensorboard").code == 0
    again = shoal("export", finished.path, "--to", "tensorboard")
    assert again.code == 2
    where = f"exports/tensorboard/quick/{finished.path.name}"
    assert f"{where} already has an export of this run; remove this folder" in again.err
    assert len(scalars(tensorboard(tmp_path / where), "train_loss")) == 4
    assert shoal("export", finished.path, "--to", "tensorboard", "--out", "other").code == 0


def test_a_run_that_cannot_be_exported_does_not_stop_the_others(
    shoal: Callable[..., Any], finished: RunFolder, copy: RunFolder, tmp_path: Path
) -> None:
    other = RunFolder(copy.path.rename(copy.path.with_name("other")))
    damaged = RunFolder(tmp_path / "copies" / "quick" / "damaged")
    shutil.copytree(other.path, damaged.path)
    damaged.node(1).write_text("damaged\n")
    assert shoal("export", finished.path, "--to", "tensorboard").code == 0
    result = shoal("export", finished.path, damaged.path, other.path, "--to", "tensorboard")
    assert result.code == 2
    assert f"quick/{finished.path.name} already has an export of this run" in result.err
    assert "damaged/nodes/1.jsonl, line 1 is damaged" in result.err
    assert f"{other.path}: exports/tensorboard/quick/other" in result.out
    assert "train_loss" in tags(tmp_path / "exports" / "tensorboard" / "quick" / "other")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "tensorbord"], "unknown target 'tensorbord'; did you mean 'tensorboard'?"),
        (["--to", "excel"], "unknown target 'excel'; expected one of mlflow, tensorboard, wandb"),
        (["--to", "safetensors"], "'shoal export-model RUN FILE.safetensors' writes final models"),
        (["--to", "tensorboard", "--out", "/proc/logs"], "cannot write '/proc/logs'"),
        (["--to", "mlflow", "--out", "/proc/logs"], "cannot write '/proc/logs'"),
        (["--to", "wandb", "--out", "/proc/logs"], "cannot write '/proc/logs'"),
        (["--to", "tensorboard", "--nodes", "2-9"], "nodes = '2-9': there is no node 4"),
        (["--to", "tensorboard", "--nodes", "all"], "expected numbers and ranges such as '0-3, 8'"),
    ],
)
def test_wrong_arguments_are_rejected(
    arguments: list[str], text: str, shoal: Callable[..., Any], finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = shoal("export", finished.path, *arguments)
    assert result.code == 2
    assert text in result.err
    assert "Traceback" not in result.err


def test_a_folder_without_a_run_is_rejected(shoal: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = shoal("export", "empty", "--to", "tensorboard")
    assert result.code == 2
    assert "there is no run in 'empty'" in result.err


def test_a_missing_package_is_named_with_the_extra(
    shoal: Callable[..., Any], finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, target in (("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")):
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.delitem(sys.modules, f"shoal.results.exports.to_{target}", raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        result = shoal("export", finished.path, "--to", target)
        assert result.code == 2
        assert f"pip install 'shoal[{target}]'" in result.err


def test_damaged_records_are_an_error_and_a_last_line_that_is_cut_off_is_left_out(
    shoal: Callable[..., Any], copy: RunFolder, tmp_path: Path
) -> None:
    whole = copy.node(1).read_bytes()
    copy.node(1).write_bytes(whole + b'{"kind":"round","rou')
    assert shoal("export", copy.path, "--to", "tensorboard", "--out", "cut").code == 0
    events = tensorboard(tmp_path / "cut" / "quick" / copy.path.name)
    assert scalars(events, "nodes") == {1: 4, 2: 4, 3: 4, 4: 4}
    lines = whole.splitlines(keepends=True)
    copy.node(1).write_bytes(b"".join([*lines[:2], b"damaged\n", *lines[2:]]))
    result = shoal("export", copy.path, "--to", "tensorboard", "--out", "damaged")
    assert result.code == 2
    assert "1.jsonl, line 3 is damaged and not a record" in result.err
    copy.experiment.write_text('nodes = "many"')
    result = shoal("export", copy.path, "--to", "tensorboard", "--out", "damaged-experiment")
    assert result.code == 2
    assert "nodes = 'many', so the file was not written by a run" in result.err


def test_a_run_without_evaluations_has_its_other_curves(
    shoal: Callable[..., Any], copy: RunFolder, tmp_path: Path
) -> None:
    for node in range(4):
        lines = copy.node(node).read_bytes().splitlines(keepends=True)
        copy.node(node).write_bytes(b"".join(line for line in lines if b'"evaluation"' not in line))
    copy.averages.unlink()
    copy.summary.unlink()  # killed
    assert shoal("export", copy.path, "--to", "tensorboard").code == 0
    tags = tensorboard(tmp_path / "exports" / "tensorboard" / "quick" / copy.path.name).Tags()["scalars"]
    assert "train_loss" in tags
    assert not [tag for tag in tags if tag.startswith(("accuracy/", "averaged_model/"))]


def test_a_failed_node_counts_until_its_last_record_and_a_diverged_one_gives_nan(
    shoal: Callable[..., Any], copy: RunFolder, tmp_path: Path
) -> None:
    lines = copy.node(3).read_bytes().splitlines(keepends=True)
    first_rounds = [line for line in lines if b'"round":0' in line or b'"round":1' in line]
    copy.node(3).write_bytes(b"".join(first_rounds))
    text = copy.node(0).read_text()
    copy.node(0).write_text(text.replace('"accuracy":', '"accuracy":null,"other":'))
    assert shoal("export", copy.path, "--to", "tensorboard").code == 0
    events = tensorboard(tmp_path / "exports" / "tensorboard" / "quick" / copy.path.name)
    assert scalars(events, "nodes") == {1: 4, 2: 4, 3: 3, 4: 3}
    sent = scalars(events, "bytes_sent")
    assert sorted(sent.values()) == list(sent.values()), "what the failed node has sent still counts"
    assert all(math.isnan(value) for value in scalars(events, "accuracy/mean").values())


def test_several_runs_are_exported_with_one_command(shoal: Callable[..., Any], copy: RunFolder) -> None:
    other = RunFolder(copy.path.with_name("other"))
    shutil.copytree(copy.path, other.path)
    result = shoal("export", copy.path, other.path, "--to", "tensorboard", "--follow")
    assert result.code == 2
    assert "--follow: 1 problem\n  - it takes one run, and 2 are given" in result.err
    result = shoal("export", copy.path, other.path, "--to", "tensorboard")
    assert result.code == 0
    assert "tensorboard/quick/other" in result.out


def test_a_final_model_is_loaded_by_the_code_in_the_documentation(
    shoal: Callable[..., Any], finished: RunFolder
) -> None:
    text = (Path(__file__).parent.parent / "docs" / "exports.md").read_text()
    code = next(block.split("```")[0] for block in text.split("```python\n")[1:] if "load_file" in block)
    statements = [line for line in code.splitlines() if line.strip() and not line.startswith(("from ", "import "))]
    assert len(statements) == 3
    assert shoal("export-model", finished.path, "model.safetensors").code == 0
    loaded: dict[str, Any] = {}
    exec(code, loaded)
    own = package.open_run(finished.path).model("average")
    for name, tensor in own.state_dict().items():
        assert loaded["module"].state_dict()[name].equal(tensor)


# Runs in progress


def append(folder: RunFolder, node: int, *records: Record) -> None:
    file = RecordFile(folder.node(node))
    for record in records:
        file.write(record)
    file.close()


def a_round(number: int, time: float) -> Round:
    return Round(number, time, loss=1.0, bytes_sent=100 * (number + 1), messages_sent=number + 1)


@pytest.fixture
def going(tmp_path: Path) -> RunFolder:
    """The folder of a run with 3 nodes that has just started."""
    folder = RunFolder.create(tmp_path / "runs", "live")
    folder.experiment.write_text("name = 'live'\nengine = 'processes'\nnodes = 3\nseed = 1\n")
    return folder


def test_an_export_follows_a_run_and_writes_each_point_once(
    going: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, seen = tmp_path / "logs" / "live" / going.path.name, []
    release = lock(going)
    release.__enter__()

    def advance(seconds: float) -> None:
        """The run takes its next step between two looks at it."""
        at = len(seen)
        seen.append(len(tensorboard(logs).Scalars("train_loss")) if "train_loss" in tags(logs) else 0)
        if at < 3:
            for node in range(3):
                append(going, node, a_round(at, at + 0.1), Evaluation(at, at + 0.2, {"accuracy": 0.1 * node}))
        elif at == 4:
            release.__exit__(None, None, None)

    monkeypatch.setattr("shoal.results.exports.follow.time.sleep", advance)
    export_run(going, "tensorboard", tmp_path / "logs", follow=True)
    events = tensorboard(logs)
    assert scalars(events, "bytes_sent") == {1: 300, 2: 600, 3: 900}
    assert scalars(events, "accuracy/mean") == pytest.approx({1: 0.1, 2: 0.1, 3: 0.1})
    assert seen[:5] == [0, 1, 2, 3, 3], "points can be read during the run"
    assert "summary/nodes" in events.Tags()["scalars"]


def tags(logs: Path) -> list[str]:
    return list(tensorboard(logs).Tags()["scalars"])


def test_a_round_in_progress_waits_for_slow_nodes_but_not_for_failed_ones(
    going: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr("shoal.results.exports.points.time.monotonic", lambda: clock)
    points = export_points.RunPoints(going, nodes=3, evaluated=3)
    for node in range(3):
        append(going, node, a_round(0, 1.0))
    assert [point.step for point in points.read(in_progress=True)] == [1]
    for node in (0, 1):
        append(going, node, a_round(1, 2.0))
    clock = 100.0  # nodes 0 and 1 are not far ahead: node 2 is slow
    assert not list(points.read(in_progress=True))
    for node in (0, 1):
        append(going, node, *(a_round(number, number + 1.0) for number in range(2, 6)))
    clock = 200.0
    found = list(points.read(in_progress=True))
    assert [point.step for point in found] == [2, 3, 4, 5, 6]
    assert {point.values["nodes"] for point in found} == {2}
    append(going, 2, a_round(6, 7.0))  # it was restarted
    assert not list(points.read(in_progress=True)), "nodes 0 and 1 have not finished this round"
    for node in (0, 1):
        append(going, node, a_round(6, 7.0))
    [last] = points.read(in_progress=True)
    assert (last.step, last.values["nodes"]) == (7, 3)


def test_only_evaluated_nodes_are_awaited(going: RunFolder) -> None:
    points = export_points.RunPoints(going, nodes=3, evaluated=2)
    append(going, 0, a_round(0, 1.0), Evaluation(0, 1.0, {"accuracy": 0.2}))
    append(going, 1, a_round(0, 1.0))
    assert not [p for p in points.read(in_progress=True) if "accuracy/mean" in p.values]
    append(going, 2, a_round(0, 1.0), Evaluation(0, 1.0, {"accuracy": 0.4}))
    [found] = [p for p in points.read(in_progress=True) if "accuracy/mean" in p.values]
    assert found.values["accuracy/mean"] == pytest.approx(0.3)


def test_an_export_without_follow_of_a_run_in_progress_has_no_summary_and_a_notice(
    shoal: Callable[..., Any], going: RunFolder, tmp_path: Path
) -> None:
    for node in range(3):
        append(going, node, a_round(0, 1.0))
    with lock(going):
        result = shoal("export", going.path, "--to", "tensorboard")
    assert result.code == 0
    assert "is in progress: only the records so far are exported; with --follow, the export goes on" in result.out
    found = tags(tmp_path / "exports" / "tensorboard" / "live" / going.path.name)
    assert "train_loss" in found
    assert not [tag for tag in found if tag.startswith("summary/")]
