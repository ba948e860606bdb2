"""Records of what nodes do and to which nodes they send, in both engines, and the timelines and graphs made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import CommandResult
from shoal.errors import DataError
from shoal.experiment import Experiment
from shoal.experiment.run_results import Run
from shoal.node_activity import NodeActivity
from shoal.results.activity import KINDS, failed_nodes, read_edges, read_segments
from shoal.results.frames import read_records
from shoal.results.graph_layout import positions
from shoal.results.graph_plot import topology_figure
from shoal.results.node_data import read_node_data
from shoal.results.records import End, Evaluation, Record, RecordFile, Round, RunFolder, decode, encode
from shoal.results.spans import MAX_SPANS, condensed
from shoal.results.thinning import ALL_ROUNDS, Thinning
from shoal.results.timeline_plot import activity_shares, timeline_figure

STRAGGLER = 1


def experiment(engine: str = "simulation", **settings: Any) -> Experiment:
    table = {
        "nodes": 4,
        "seed": 3,
        "engine": engine,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "topology": {"name": "ring"},
        "dataset": {"name": "digits", "partition": {"name": "shards", "per_node": 2}},
        "training": {"batch_size": 16, "local_steps": 1},
        "evaluation": {"every": 3},
        "speed": {"name": "constant", "step_seconds": 0.02},
        "simulation": {"batching": "off"},
    }
    return Experiment.from_table({**table, **settings})


def seconds(run: Run | RunFolder, kind: str) -> dict[int, float]:
    """The total time of one kind of segment, by node."""
    segments = read_segments(run if isinstance(run, RunFolder) else run.folder)
    return {n: math.fsum(end - start for k, start, end in segments.of(n) if k == kind) for n in segments.nodes}


def rounds_of(folder: RunFolder, node: int) -> list[Round]:
    return [record for record in folder.read(node) if isinstance(record, Round)]


def written(path: Path, files: dict[int, list[Record]]) -> RunFolder:
    folder = RunFolder(path)
    (path / "nodes").mkdir(parents=True)
    folder.experiment.write_text('engine = "simulation"\nnodes = 4\nseed = 1')
    for node, records in files.items():
        file = RecordFile(folder.node(node))
        for record in records:
            file.write(record)
        file.close()
    return folder


# Recording


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_straggler_trains_for_long_and_its_neighbours_wait_for_it(engine: str, tmp_path: Path) -> None:
    slow = {"nodes": str(STRAGGLER), "speed": {"name": "constant", "step_seconds": 0.4}}
    run = experiment(engine, group=[slow]).run(tmp_path)
    trained, waited = seconds(run, "train"), seconds(run, "wait")
    assert trained[STRAGGLER] > 1.1
    for neighbour in (0, 2):
        assert trained[neighbour] < 0.6
        assert waited[neighbour] > 0.6 > waited[STRAGGLER]
    for node in range(4):
        records = rounds_of(run.folder, node)
        neighbours = sorted([(node - 1) % 4, (node + 1) % 4])
        assert [record.sent_to for record in records] == [neighbours, None, None]
        spans = [span for record in records for span in record.spans]
        assert all(start < end for _, start, end in spans)
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(spans))
    data = read_node_data(run.folder)
    assert data.class_counts is not None
    assert data.samples == [sum(row) for row in data.class_counts]
    assert all(sum(count > 0 for count in row) < 10 for row in data.class_counts)


def test_the_spans_of_a_simulated_run_are_exact(tmp_path: Path) -> None:
    network = {"name": "uniform", "upload": 1000.0, "latency": 0.1}
    slow = {"nodes": str(STRAGGLER), "speed": {"name": "constant", "step_seconds": 0.5}}
    run = experiment(group=[slow], network=network).run(tmp_path)
    first = rounds_of(run.folder, 0)[0]
    (train, wait) = first.spans
    assert train[:2] == ("train", 0.0)
    assert train[2] == pytest.approx(0.02)
    assert wait == ("wait", train[2], first.time)
    assert first.time == pytest.approx(0.6, abs=0.01)  # the straggler's training, and the latency


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_background_task_that_waits_does_not_make_its_node_wait(engine: str, tmp_path: Path) -> None:
    run = experiment(engine, algorithm={"name": "gossip", "rounds": 4}).run(tmp_path)
    segments = read_segments(run.folder)
    assert KINDS.index("wait") not in segments.kind
    assert (segments.kind == KINDS.index("train")).sum() >= 4
    assert all(len(record.sent_to or [0]) == 1 for node in range(4) for record in rounds_of(run.folder, node))


def test_the_edges_of_each_round_are_those_of_the_graph(tmp_path: Path) -> None:
    planned = experiment(nodes=8, topology={"name": "regular", "degree": 3, "dynamic": True})
    run = planned.run(tmp_path)
    edges = read_edges(run.folder)
    graph = planned.topology.build().build(8, planned.seed)
    for round in range(3):
        expected = sorted([n, peer] for n in range(8) for peer in graph.links(n, round).receivers)
        assert edges.at_round(round).tolist() == expected
    assert edges.at_time(math.inf).tolist() == edges.at_round(2).tolist()
    assert not edges.static
    assert edges.at_round(3).size == 0


def test_control_messages_are_no_edges(tmp_path: Path) -> None:
    run = experiment(algorithm={"name": "fedavg", "rounds": 2}).run(tmp_path)
    edges = read_edges(run.folder)
    server = 4
    assert edges.at_round(1).tolist() == [*([n, server] for n in range(4)), *([server, n] for n in range(4))]


def test_failed_and_offline_times_are_segments(tmp_path: Path) -> None:
    (tmp_path / "online.csv").write_text("2,0,0.05\n2,0.25,inf")
    run = experiment(
        algorithm={"name": "dpsgd", "rounds": 40},
        availability={"name": "intervals", "path": str(tmp_path / "online.csv")},
        fault=[
            {"kind": "crash", "nodes": "0", "time": 0.5, "lasting": 0.3},
            {"kind": "crash", "nodes": "3", "time": 0.7},
        ],
        simulation={"batching": "off", "receive_timeout": 0.2},
    ).run(tmp_path)
    segments = read_segments(run.folder)
    assert [s[1:] for s in segments.of(0) if s[0] == "failed"] == [pytest.approx((0.5, 0.8))]
    assert [s[1:] for s in segments.of(3) if s[0] == "failed"] == [pytest.approx((0.7, segments.duration))]
    assert [s[1:] for s in segments.of(2) if s[0] == "offline"] == [pytest.approx((0.05, 0.25))]
    assert failed_nodes(read_records(run.folder), 0.6) == {0}
    assert failed_nodes(read_records(run.folder), segments.duration) == {3}
    for node in range(4):
        times = segments.of(node)
        assert times[0][1] == 0.0
        assert all(before[2] == after[1] for before, after in itertools.pairwise(times)), "no gap, no overlap"


def test_a_node_has_few_spans_whatever_it_does() -> None:
    activity, waited = NodeActivity(), 0.0
    for i in range(5_000):
        activity.add("train", float(i), i + 0.25)
        activity.add("wait", i + 0.25, i + 0.5)
        waited += 0.25
    _, spans = activity.take()
    assert len(spans) <= MAX_SPANS
    assert math.fsum(end - start for kind, start, end in spans if kind == "wait") == pytest.approx(waited)
    assert all(before[2] <= after[1] + 1e-9 for before, after in itertools.pairwise(spans))
    assert activity.take() == (None, [])


def test_an_activity_is_suspended_while_the_node_is_offline() -> None:
    activity = NodeActivity()
    activity.interrupt("offline", 2.0, 3.0)
    activity.interrupt("offline", 4.0, 4.5)
    activity.add("train", 1.0, 6.0)
    activity.add("send", 6.0, 6.0)
    spans = [("train", 1, 2), ("offline", 2, 3), ("train", 3, 4), ("offline", 4, 4.5), ("train", 4.5, 6)]
    assert activity.take() == ([], spans)
    activity.interrupt("offline", 7.5, 8.0)
    activity.interrupt("train", 7.0, 9.0)  # by a background task
    activity.add("wait", 6.0, 10.0)
    spans = [("wait", 6, 7), ("train", 7, 7.5), ("offline", 7.5, 8), ("train", 8, 9), ("wait", 9, 10)]
    assert activity.take() == (None, spans)


def test_rounds_that_are_left_out_lose_neither_time_nor_receivers() -> None:
    thinning = Thinning()
    files: list[Round] = []
    for r in range(ALL_ROUNDS, ALL_ROUNDS + 21):
        sent_to = [1] if r == ALL_ROUNDS else [2, 3] if r == ALL_ROUNDS + 4 else None
        spans = [("train", float(r), r + 0.5), ("wait", r + 0.5, r + 1.0)]
        added = thinning.add(Round(r, r + 1.0, None, 0, 0, sent_to, spans))
        files += [record for record in added if isinstance(record, Round)]
    assert [record.round - ALL_ROUNDS for record in files] == [0, 10, 20]
    assert [record.sent_to for record in files] == [[1], [2, 3], None]
    assert files[1].spans == [
        ("train", ALL_ROUNDS + 1.0, ALL_ROUNDS + 6.0),
        ("wait", ALL_ROUNDS + 6.0, ALL_ROUNDS + 11.0),
    ]


def test_condensed_spans_of_one_activity_are_in_order() -> None:
    spans = [("wait", float(i), i + 0.5) for i in range(200)]
    assert sum(end - start for _, start, end in condensed(spans)) == pytest.approx(100.0)


def test_records_of_earlier_versions_are_read_and_rewritten_unchanged() -> None:
    line = b'{"kind":"round","round":0,"time":1.0,"loss":null,"bytes_sent":5,"messages_sent":1}'
    record = decode(line)
    assert isinstance(record, Round)
    assert record.sent_to is None
    assert record.spans == []
    assert encode(record) == line


# Figures


@pytest.mark.parametrize("kind", ["timeline", "topology"])
def test_a_run_of_an_earlier_version_has_no_such_figure(
    kind: str, tmp_path: Path, shoal: Callable[..., CommandResult]
) -> None:
    folder = written(tmp_path / "run", {0: [Round(0, 1.0, None, 0, 0), End(1.0, "", 0, 0, 0, 0)]})
    result = shoal("plot", folder.path, "--kind", kind, "--out", tmp_path / "figure.png")
    assert result.code == 2
    assert "an earlier version of Shoal wrote the run" in result.err
    assert not (tmp_path / "figure.png").exists()


def many_nodes(path: Path, nodes: int, rounds: int) -> RunFolder:
    """A run in which node 7 trains for 0.9 s of each round, and others for 0.3 s."""
    files: dict[int, list[Record]] = {}
    for node in range(nodes):
        busy = 0.9 if node == 7 else 0.3
        spans = [[("train", float(r), r + busy), ("wait", r + busy, r + 1.0)] for r in range(rounds)]
        sent_to = [(node + 1) % nodes, (node - 1) % nodes]
        files[node] = [Round(r, r + 1.0, 1.0, 0, 0, None if r else sent_to, spans[r]) for r in range(rounds)]
        files[node].append(End(float(rounds), "", 0, 0, 0, 0))
    return written(path, files)


def test_the_shares_of_a_timeline_are_those_of_the_records(tmp_path: Path) -> None:
    segments = read_segments(many_nodes(tmp_path / "run", 100, 40))
    shares = activity_shares(segments, np.arange(100), 100, 8, 0.0, 40.0)
    assert shares.sum(axis=2) == pytest.approx(1.0)
    train = shares[:, :, KINDS.index("train")]
    assert train[7] == pytest.approx(0.9)
    assert np.delete(train, 7, axis=0) == pytest.approx(0.3)
    part = activity_shares(segments, np.arange(100), 50, 1, 0.5, 1.0)
    assert part[0, 0, KINDS.index("train")] == pytest.approx(0.0)
    assert part[3, 0, KINDS.index("train")] == pytest.approx((0.8 + 0.0) / 2)  # nodes 6 and 7


@pytest.mark.parametrize(("nodes", "rounds"), [(4, 5), (100, 5), (100, 600), (1500, 3)])
def test_a_timeline_shows_all_nodes_and_its_legend_covers_no_data(nodes: int, rounds: int, tmp_path: Path) -> None:
    figure = timeline_figure(many_nodes(tmp_path / "run", max(nodes, 8) if nodes > 4 else 4, rounds))
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["train", "wait for messages"]
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    if nodes > 64:
        assert "7, " in axes.get_ylabel(), "the straggler is named first"


def test_a_timeline_of_a_wrong_time_is_an_error(tmp_path: Path) -> None:
    folder = many_nodes(tmp_path / "run", 8, 5)
    assert timeline_figure(folder, start=1.0, end=2.0).axes[0].get_xlim() == (1.0, 2.0)
    with pytest.raises(DataError, match="nothing from 7 s to 9 s; the run took 5 s"):
        timeline_figure(folder, start=7.0, end=9.0)


def test_a_graph_is_coloured_by_score_or_by_class(tmp_path: Path) -> None:
    run = experiment(fault=[{"kind": "crash", "nodes": "2", "round": 1}]).run(tmp_path)
    texts = {text.get_text() for text in topology_figure(run.folder).axes[0].texts}
    assert texts == {"0", "1", "2", "3"}
    by_class = topology_figure(run.folder, round=0, colour="class")
    labels = [text.get_text() for text in by_class.legends[0].get_texts()]
    assert labels == [str(label) for label in range(10)]
    with pytest.raises(DataError, match="'f1' was not measured; use one of accuracy, loss, class"):
        topology_figure(run.folder, colour="f1")
    with pytest.raises(DataError, match="round = 9; the run has rounds 0 to 2"):
        topology_figure(run.folder, round=9)
    run.folder.data.write_text('{"samples": [1, 2], "class_counts": [[1]]}')
    with pytest.raises(DataError, match="damaged"):
        topology_figure(run.folder, colour="class")


@pytest.mark.parametrize("count", [1, 2, 5, 40, 130, 300])
def test_positions_are_repeatable_and_neighbours_are_near(count: int) -> None:
    ring = np.array([(i, (i + 1) % count) for i in range(count)])
    points = positions(count, ring[ring[:, 0] != ring[:, 1]])
    assert (points == positions(count, ring[ring[:, 0] != ring[:, 1]])).all()
    assert np.isfinite(points).all()
    if count > 5:
        linked = np.linalg.norm(points - np.roll(points, -1, axis=0), axis=1).mean()
        opposite = np.linalg.norm(points - np.roll(points, count // 2, axis=0), axis=1).mean()
        assert linked < opposite / 3


def test_a_run_that_has_just_started_is_no_run_of_an_earlier_version(tmp_path: Path) -> None:
    folder = written(tmp_path, {0: [], 1: []})
    for read in (read_segments, read_edges):
        with pytest.raises(DataError, match="no node has finished a round yet"):
            read(folder)


def test_the_graph_without_a_round_is_that_of_the_last_round_of_all_nodes(tmp_path: Path) -> None:
    """With asynchronous algorithms, only the fastest node may have the highest round."""
    slow = [Round(r, 2.0 * r, 1.0, 0, 0, sent_to=[1]) for r in range(3)]
    fast = [Round(r, 0.5 * r, 1.0, 0, 0, sent_to=[0]) for r in range(9)]
    folder = written(tmp_path, {0: slow, 1: fast, 2: slow[:1]})
    edges = read_edges(folder)
    assert (edges.last_round, edges.common_round({2}), edges.common_round(())) == (8, 2, 0)
    assert sorted(edges.at_round(2).tolist()) == [[0, 1], [1, 0]]


def test_a_node_that_is_evaluated_after_its_end_has_ended(tmp_path: Path) -> None:
    end = End(2.0, "digest", 0, 0, 0, 0)
    rounds: list[Record] = [Round(0, 1.0, 1.0, 0, 0, spans=[("train", 0.0, 1.0)])]
    folder = written(tmp_path, {0: [*rounds, end, Evaluation(0, 9.0, {"loss": 1.0})], 1: [*rounds, end], 2: rounds})
    segments = read_segments(folder)
    assert {node: segments.of(node)[-1][2] for node in (0, 1)} == {0: 2.0, 1: 2.0}
    assert segments.of(2)[-1][0] == "failed"
