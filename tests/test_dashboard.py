"""The data of the page: runs, curves, changes, past states, the timeline, one node."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dashboard_runs import WrittenRun
from dashboard_server import CLIENT, served, stream
from shoal.dashboard.feed import RunFeed
from shoal.dashboard.layout import positions
from shoal.dashboard.runs import Runs
from shoal.dashboard.statistics import MAX_POINTS
from shoal.dashboard.views import LEGEND, changes, state_at, timeline
from shoal.results.records import Average, Evaluation, RunFolder, encode
from shoal.results.timing import curve


def read(folder: RunFolder) -> RunFeed:
    feed = RunFeed(folder)
    feed.refresh()
    return feed


def id_of(run: WrittenRun, root: Path) -> str:
    return run.folder.path.relative_to(root).as_posix()


# Runs


def test_the_list_has_every_run_with_its_status(tmp_path: Path) -> None:
    WrittenRun(tmp_path / "done", "done").finish()
    WrittenRun(tmp_path / "sweep" / "deep", "going", seed=2).advance(2)
    old = WrittenRun(tmp_path / "stopped", "stopped", seed=3)
    old.advance(2)
    for path in old.folder.path.rglob("*"):
        os.utime(path, (0, 0))
    damaged = tmp_path / "damaged" / "run"
    damaged.mkdir(parents=True)
    (damaged / "summary.json").write_text('{"status": "compl')
    (tmp_path / "no run").mkdir()
    found = {info.name: info for info in Runs(tmp_path).all()}
    statuses = {name: info.status for name, info in found.items()}
    assert statuses == {"done": "completed", "going": "running", "stopped": "unfinished", "damaged": "damaged"}
    assert (found["done"].nodes, found["done"].metric, found["done"].score) == (8, "accuracy", 0.8)
    assert found["going"].rounds == 12
    assert "summary.json cannot be read" in found["damaged"].problem


def test_a_folder_that_is_a_run_is_the_only_run(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.finish()
    assert [info.id for info in Runs(run.folder.path).all()] == ["."]


def test_new_runs_appear_in_the_stream(tmp_path: Path) -> None:
    with served(tmp_path) as url, stream(url) as events:
        assert events.next() == ("runs", [])
        WrittenRun(tmp_path / "a", "first").finish()
        kind, runs = events.next()
        assert kind == "runs"
        assert [run["name"] for run in runs] == ["first"]


# Curves


@pytest.mark.parametrize("failing", [None, 3])
def test_curves_are_those_of_the_results(tmp_path: Path, failing: int | None) -> None:
    run = WrittenRun(tmp_path, failing=failing)
    run.finish()
    feed = read(run.folder)
    feed.end({} if failing is None else {str(failing): "crashed"})
    expected, found = curve(run.folder), changes(feed, 0, False)["curves"]["accuracy"]
    for name, values in (("mean", expected.means), ("min", expected.mins), ("max", expected.maxs)):
        assert np.allclose(found[name], values)
    assert np.allclose(found["time"], expected.times)
    assert found["round"] == list(expected.rounds)


def test_curves_by_ticks_are_those_of_the_results(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=3, evaluate_every=100)
    run.finish()
    for node, ticks in enumerate([(1, 2, 3), (1, 3), (2, 3)]):  # a node that is offline is not evaluated
        records = [Evaluation(2 * tick, 4.0 * tick, {"accuracy": 0.1 * tick + 0.01 * node}, tick) for tick in ticks]
        with run.folder.node(node).open("ab") as file:
            file.write(b"".join(encode(record) + b"\n" for record in records))
    # Averages are evaluated in parallel. Their round is the number of the tick.
    averages = [Average(tick, 4.0 * tick, 3, 1 / tick, {"accuracy": 0.1 * tick}, tick) for tick in (2, 1, 3)]
    run.folder.averages.write_bytes(b"".join(encode(average) + b"\n" for average in averages))
    feed = read(run.folder)
    feed.end({})
    expected, found = curve(run.folder), changes(feed, 0, False)
    accuracy, averaged = found["curves"]["accuracy"], found["averages"]
    assert np.allclose(accuracy["mean"], expected.means)
    assert np.allclose(accuracy["round"], expected.rounds)
    assert averaged["moment"] == accuracy["moment"] == [1, 2, 3]
    assert averaged["round"] == accuracy["round"]
    assert averaged["time"] == [4.0, 8.0, 12.0]
    assert averaged["scores"]["accuracy"] == pytest.approx([0.1, 0.2, 0.3])


def test_reading_in_parts_gives_the_same_as_reading_at_once(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, failing=2)
    feed = RunFeed(run.folder)
    for _ in range(run.rounds):
        run.advance()
        assert feed.refresh()
    run.finish()
    feed.refresh()
    assert changes(feed, 0, True) == changes(read(run.folder), 0, True)


def test_a_score_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=2)
    run.advance(4)
    with run.folder.node(0).open("ab") as file:
        file.write(encode(Evaluation(5, 6.0, {"accuracy": float("nan")})) + b"\n")
    found = changes(read(run.folder), 0, False)["curves"]["accuracy"]
    assert np.isfinite(found["mean"][:2]).all()
    assert np.isnan(found["mean"][2])


def test_a_long_run_has_few_points(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=2, rounds=3 * MAX_POINTS, activity=False, evaluate_every=10**6)
    run.finish()
    found = changes(read(run.folder), 0, False)["training"]["bytes"]
    assert MAX_POINTS / 2 < found["size"] <= MAX_POINTS
    assert found["round"][-1] == run.rounds
    assert found["sum"][-1] == 2 * run.rounds * 2 * 1000


# Changes


def test_a_stream_has_only_what_is_new(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "a")
    run.advance(4)
    with served(tmp_path) as url, stream(url, run=id_of(run, tmp_path), nodes=1) as events:
        kind, first = events.next()
        assert (kind, first["reset"], first["info"]["status"]) == ("run", True, "running")
        assert first["curves"]["accuracy"]["rows"] == [0, 1]
        assert len(first["edges"]["to"]) == 16
        run.advance(2)
        later = events.next()[1]
        while len(later["state"]["id"]) < run.nodes or "accuracy" not in later["curves"]:
            later = events.next()[1]  # it was read while the records were written
        assert not later["reset"]
        assert later["curves"]["accuracy"]["rows"] == [2]
        assert "edges" not in later, "the edges are the same"
        run.finish()
        while later["info"]["status"] != "completed":
            later = events.next()[1]


def test_a_page_continues_after_its_cursor(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "a")
    run.advance(4)
    id = id_of(run, tmp_path)
    with served(tmp_path) as url:
        with stream(url, run=id) as events:
            cursor = events.next()[1]["cursor"]
        run.advance(2)
        with stream(url, run=id, cursor=cursor) as events:
            found = events.next()[1]
            assert not found["reset"]
            assert found["curves"]["accuracy"]["rows"] == [2]
    with served(tmp_path) as url, stream(url, run=id, cursor=cursor) as events:
        assert events.next()[1]["reset"], "another server does not know the cursor"


def test_a_line_that_is_being_written_is_read_when_it_is_complete(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=1)
    run.advance(2)
    line = encode(Evaluation(3, 4.0, {"accuracy": 0.75}))
    with run.folder.node(0).open("ab") as file:
        file.write(line[:20])
        file.flush()
        feed = read(run.folder)
        assert changes(feed, 0, False)["curves"]["accuracy"]["size"] == 1
        file.write(line[20:] + b"\n")
    feed.refresh()
    assert changes(feed, 0, False)["curves"]["accuracy"]["mean"][-1] == 0.75
    assert feed.tail.damaged == 0


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=2)
    run.advance(4)
    numbers = b'{"kind":"round","round":%d,"time":1.0,"loss":1.0,"bytes_sent":%d,"messages_sent":1,"sent_to":[%d]}'
    too_large = [numbers % (10**25, 1, 1), numbers % (1, 10**25, 1), numbers % (1, 1, 10**25)]
    for line in (b"\xff\xfe", b'{"kind":"round"}', b"[]", b'"x"', b"[" * 100_000, *too_large):
        with run.folder.node(0).open("ab") as file:
            file.write(line + b"\n")
    run.advance(2)
    found = changes(read(run.folder), 0, True)
    assert found["damaged"] == 8
    assert found["state"]["round"] == [6, 6]


def test_records_that_were_cut_are_read_again(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=2, activity=False)
    run.advance(6)
    feed = read(run.folder)
    before = feed.incarnation
    for node in range(2):
        path = run.folder.node(node)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert feed.refresh()
    assert feed.incarnation == before + 1
    assert changes(feed, 0, True)["state"]["round"] == [2, 2]


# Past states, the graph and the timeline


def test_the_state_at_a_time_has_the_edges_of_that_round(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=10, degree=3, dynamic=True, failing=4)
    run.finish()
    feed = read(run.folder)
    early, late = state_at(feed, 2.5), state_at(feed, 8.5)
    assert set(early["state"]["round"]) == {2}
    assert early["edges"]["count"] == [3] * 10
    assert early["edges"]["to"] != late["edges"]["to"]
    assert late["state"]["state"] == [0] * 4 + [2] + [0] * 5
    assert late["edges"]["count"][4] == 0, "a failed node sends nothing"
    assert early["state"]["scores"]["accuracy"][0] < late["state"]["scores"]["accuracy"][0]


def test_a_timeline_has_what_nodes_did(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=4, rounds=6, failing=2)
    run.finish()
    feed = read(run.folder)
    found = timeline(feed, 0, 10, 0.0, 6.0, 600, "node")
    assert found["id"] == [0, 1, 2, 3]
    shares = []
    for row in found["rows"]:
        totals = dict.fromkeys(LEGEND, 0)
        for activity, length in zip(row[::2], row[1::2], strict=True):
            totals[LEGEND[activity]] += length
        shares.append(totals)
    assert all(sum(totals.values()) == 600 for totals in shares)
    assert shares[0]["send"] == pytest.approx(60, abs=6)
    assert 0.4 * 600 < shares[0]["train"] < 0.8 * 600
    assert shares[2]["failed"] == pytest.approx(300, abs=2)
    slowest = timeline(feed, 0, 1, 0.0, 6.0, 600, "train")["id"][0]
    assert shares[slowest]["train"] == max(totals["train"] for totals in shares)


def test_runs_without_activity_have_neither_edges_nor_spans(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, activity=False)
    run.finish()
    feed = read(run.folder)
    found = changes(feed, 0, True)
    assert (found["has_edges"], found["has_spans"]) == (False, False)
    assert "edges" not in found
    assert len(positions(feed)) == run.nodes


@pytest.mark.parametrize(("nodes", "dynamic"), [(1, False), (3, False), (40, False), (40, True), (100, True)])
def test_nodes_of_a_graph_have_places_of_their_own(tmp_path: Path, nodes: int, dynamic: bool) -> None:
    run = WrittenRun(tmp_path, nodes=nodes, rounds=3, degree=2 if nodes > 1 else 0, dynamic=dynamic)
    run.finish()
    points = positions(read(run.folder))
    assert points.shape == (nodes, 2)
    assert np.isfinite(points).all()
    assert np.abs(points).max() <= 1.0 + 1e-6
    assert len({tuple(point) for point in points.round(3)}) == nodes


def test_a_ring_is_drawn_as_a_ring(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, nodes=24, rounds=2)
    run.finish()
    points = positions(read(run.folder))
    steps = np.linalg.norm(points - np.roll(points, 1, axis=0), axis=1)
    assert steps.max() < 1.5 * steps.min(), "neighbours have about the same distance"


def test_a_node_is_read_from_the_byte_that_the_page_has(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "a", failing=1)
    run.advance(6)
    run.folder.data.write_text('{"samples":[5,7],"class_counts":[[5,0,0],[0,3,4]]}')
    with served(tmp_path) as url:
        query = {"run": id_of(run, tmp_path), "node": 1}
        first = CLIENT.get(f"{url}/api/node", params=query).json()
        assert first["rounds"]["round"] == [1, 2, 3, 4]
        assert [event["detail"] for event in first["events"]] == ["node 1 crashes"]
        assert first["data"] == {"samples": 7, "classes": {"1": 3, "2": 4}}
        query["node"], query["offset"] = 0, CLIENT.get(f"{url}/api/node", params=query | {"node": 0}).json()["offset"]
        run.advance(1)
        later = CLIENT.get(f"{url}/api/node", params=query).json()
        assert later["rounds"]["round"] == [7]
        assert later["count"] == 1
        missing = CLIENT.get(f"{url}/api/node", params=query | {"node": 99, "offset": 0})
        assert (missing.status_code, "no records" in missing.json()["error"]) == (404, True)
