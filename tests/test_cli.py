"""The command line: every command works, and wrong input ends in one clear message and exit code 2."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import schema
from shoal.cli.commands.plot import plot_runs
from shoal.errors import ExperimentError
from shoal.experiment.registry import REGISTRIES, components
from shoal.results.records import RunFolder

ENGINES = ("simulation", "processes")


def latest(folder: Path) -> RunFolder:
    return RunFolder(max(folder.glob("*/*/experiment.toml"), key=lambda f: f.stat().st_mtime).parent)


def assert_rejected(result, *texts: str) -> None:  # type: ignore[no-untyped-def]
    assert result.code == 2, result
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err + result.out
    for text in texts:
        assert text in result.err


# Wrong input


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["none.toml"], ["there is no file 'none.toml'"]),
        (["small.toml", "--set", "nodez=3"], ["nodez: unknown key; did you mean 'nodes'?"]),
        (["small.toml", "--set", "nodes"], ["--set", "expected key=value"]),
        (["small.toml", "--engine", "proceses"], ["engine = 'proceses'", "did you mean 'processes'?"]),
        (["small.toml", "--seed", "-1", "--set", "nodes=0"], ["2 problems", "seed = -1", "nodes = 0"]),
        (["small.toml", "--set", "sharing={name='[bold]x'}"], ["unknown sharing '[bold]x'"]),
    ],
)
def test_a_wrong_experiment_is_rejected_before_anything_is_written(
    arguments: list[str], texts: list[str], shoal: Callable, small: Path
) -> None:
    assert_rejected(shoal("run", *arguments), *texts)
    assert not Path("runs").exists()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        (["nodes=5", "topology={name='regular', degree=5}"], ["5-regular on 5 nodes", "try degree = 4"]),
        (["nodes=5", "topology={name='regular', degree=3}"], ["3-regular on 5 nodes", "try degree = 2 or 4"]),
        (["dataset.partition.per_node=1000"], ["make 6000 shards of 1438 samples", "per_node of at most 239"]),
        (["topology={name='file', path='none.txt'}"], ["none.txt: cannot read this graph: No such file"]),
        (["model={name='gn-lenet'}"], ["model = 'gn-lenet': inputs have shape (64,)"]),
    ],
    ids=["too dense", "odd", "shards", "no file", "model"],
)
def test_graphs_data_and_models_that_cannot_be_built_are_rejected_by_both_engines(
    engine: str, settings: list[str], texts: list[str], shoal: Callable, small: Path
) -> None:
    given = [part for setting in settings for part in ("--set", setting)]
    assert_rejected(shoal("run", small, "--engine", engine, *given), *texts)
    assert not list(Path("runs").iterdir())


def test_a_disconnected_graph_warns_and_runs(shoal: Callable, small: Path) -> None:
    result = shoal("run", small, "--set", "topology={name='edges', edges=[[0, 1], [2, 3], [4, 5]]}")
    assert result.code == 0
    assert "! the graph of 6 nodes is disconnected" in result.out


@pytest.mark.parametrize("out", ["small.toml/runs", "/proc/runs"])
def test_an_output_folder_that_cannot_be_written_is_rejected(out: str, shoal: Callable, small: Path) -> None:
    assert_rejected(shoal("run", small, "--out", out), f"cannot write to the output folder '{out}'", "--out")


def test_a_port_in_use_is_rejected(shoal: Callable, small: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = shoal("run", small, "--engine", "processes", "--set", f"processes.base_port={min(port, 65530)}")
    assert_rejected(
        result, f"127.0.0.1:{port}: Address already in use", "processes.base_port the first of a free range"
    )


def test_ports_beyond_the_last_are_rejected(shoal: Callable, small: Path) -> None:
    result = shoal("run", small, "--engine", "processes", "--set", "processes.base_port=65533")
    assert_rejected(result, "processes.base_port = 65533", "set it to at most 65530")


def test_more_nodes_than_fit_in_memory_are_rejected(
    shoal: Callable, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engines.processes.capacity.available_memory", lambda: 660 * 2**20)
    result = shoal("run", small, "--engine", "processes")
    assert_rejected(result, "nodes = 6: about", "fit on this machine, limited by free memory")
    assert 0 < int(re.search(r"about (\d+) nodes", result.err)[1]) < 6  # type: ignore[index]


def test_more_nodes_than_open_files_are_rejected(small: Path) -> None:
    command = f"ulimit -n 80 && exec {sys.executable} -m shoal run {small} --engine processes --set nodes=40"
    done = subprocess.run(
        ["bash", "-c", f"{command} --out {small.parent}/runs"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2, done
    assert re.search(r"nodes = 40: about \d+ nodes .* by the limit of open files \(ulimit -n\)", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_picture_with_a_wrong_format_or_folder_is_rejected(shoal: Callable, small: Path) -> None:
    result = shoal("topology", "ring", "--out", "graph.xyz")
    assert result.code == 2
    assert "expected a name that ends in .png, .svg, .pdf" in result.err
    assert_rejected(shoal("topology", "ring", "--out", "small.toml/graph.png"), "cannot write 'small.toml/graph.png'")


# Commands


def test_run_show_and_plot(shoal: Callable, small: Path) -> None:
    result = shoal("run", small, "--seed", 3, "--set", "nodes=4", "--plot")
    assert result.code == 0
    assert result.out.startswith("loading 4 nodes\n"), "plain lines if the output is not a terminal"
    assert "\x1b" not in result.out
    folder = latest(Path("runs"))
    summary = folder.read_summary()
    assert (summary["seed"], summary["nodes"], summary["engine"]) == (3, 4, "simulation")
    assert (folder.path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    for shown in (result.out, shoal("show").out, shoal("show", folder.path).out):
        assert "completed" in shown
        assert summary["digest"][:16] in shown
    assert shoal("plot", "runs", "--out", "deep/down/plot.svg").code == 0
    assert "<svg" in Path("deep/down/plot.svg").read_text()
    assert_rejected(
        shoal("plot", "runs", "--out", "small.toml/plot.png"), "--out", "cannot write 'small.toml/plot.png'"
    )
    with pytest.raises(ExperimentError, match=r"--plot: 1 problem\n.*cannot write 'small.toml/accuracy.png'"):
        plot_runs([folder], folder=Path("small.toml"), option="--plot")


def test_show_without_a_run_explains_how_to_start_one(shoal: Callable) -> None:
    assert_rejected(shoal("show"), "show: 1 problem", "there is no run in 'runs'; start one with 'shoal run FILE'")
    assert_rejected(shoal("plot", "elsewhere"), "plot: 1 problem", "there is no run in 'elsewhere'")


def test_show_reports_a_damaged_summary(shoal: Callable, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "summary.json").write_text('{"status": ')
    assert_rejected(shoal("show"), "runs/summary.json cannot be read")


@pytest.mark.parametrize("command", ["show", "plot"])
def test_a_run_of_an_earlier_version_is_read_with_a_notice(shoal: Callable, small: Path, command: str) -> None:
    assert shoal("run", small, "--set", "nodes=4").code == 0
    folder = latest(Path("runs"))
    for file in (folder.summary, *(folder.node(node) for node in range(4))):
        file.write_text(file.read_text().replace("unauthenticated_connections", "strangers"))
    result = shoal(command, "runs")
    assert result.code == 0
    assert "a run of an earlier version: its key 'strangers' is read as" in result.out
    assert "FutureWarning" not in result.out + result.err, "a notice, not a line of Python"


def test_a_run_that_diverges_ends_with_a_summary(shoal: Callable, small: Path) -> None:
    result = shoal("run", small, "--set", "training.lr=1e30")
    assert result.code == 0
    assert "not finite: training diverged" in result.out
    summary = latest(Path("runs")).read_summary()
    assert summary["loss"] == {"mean": None, "std": None, "min": None, "max": None}
    assert summary["accuracy"]["mean"] > 0


def test_list_shows_every_name_with_its_parameters(shoal: Callable) -> None:
    shown = shoal("list").out
    for kind in REGISTRIES:
        for name, cls in components(kind):
            assert re.search(rf"^  {re.escape(name)} ", shown, re.MULTILINE), name
            for parameter in schema.parameters(cls).values():
                assert f"{parameter.name}: " in shown, (name, parameter)
    only = shoal("list", "partition").out
    assert "shards" in only
    assert "dpsgd" not in only
    assert_rejected(shoal("list", "sharin"), "did you mean 'sharing'?")


def test_topology_measures_and_draws(shoal: Callable, small: Path) -> None:
    result = shoal("topology", "ring", "--nodes", 8, "--out", "x.png")
    assert result.code == 0
    assert "8 nodes, degree 2 to 2" in result.out
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    assert shoal("topology", "regular", "--nodes", 8, "--set", "degree=4", "--out", "x.svg").code == 0
    assert "<svg" in Path("x.svg").read_text()
    assert "6 nodes, degree 3 to 3" in shoal("topology", small).out
    assert_rejected(shoal("topology", "rng"), "did you mean 'ring'?")
    warned = shoal("topology", "edges", "--nodes", 4, "--set", "edges=[[0, 1], [2, 3]]")
    assert "! the graph of 4 nodes is disconnected" in warned.out
    assert "Warning" not in warned.err


def test_doctor_shows_how_many_nodes_fit(shoal: Callable) -> None:
    result = shoal("doctor")
    assert result.code == 0
    assert re.search(r"nodes that fit +[\d,]+ processes with mlp on digits", result.out)


def test_progress_is_live_in_a_terminal(small: Path) -> None:
    terminal, process_end = os.openpty()
    command = [sys.executable, "-m", "shoal", "run", str(small), "--out", str(small.parent / "runs")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdin=process_end, stdout=process_end, stderr=process_end, env=environment
    ) as process:
        os.close(process_end)
        shown = b""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the process has closed its end
                break
    os.close(terminal)
    assert process.returncode == 0, shown
    assert b"\x1b[?25l" in shown, "the cursor is hidden while the line is live"
    assert b"completed" in shown
    assert b"Traceback" not in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_simulation_writes_its_summary(number: signal.Signals, code: int, small: Path) -> None:
    runs = small.parent / "runs"
    command = [
        sys.executable,
        "-m",
        "shoal",
        "run",
        str(small),
        "--out",
        str(runs),
        "--set",
        "algorithm.rounds=1000000",
    ]

    def restore_interrupts() -> None:  # background jobs of a shell, and their children, ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restore_interrupts
    ) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not any(f.stat().st_size for f in runs.rglob("nodes/*.jsonl")):
            time.sleep(0.1)  # until the run has started
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, (out, err)
    assert "Traceback" not in err
    assert latest(runs).read_summary()["status"] == "interrupted"


def test_a_file_given_with_set_is_found_in_the_working_folder(
    shoal: Callable, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text(
        "from shoal.sharing.full import FullSharing\n\n\nclass Mine(FullSharing):\n    pass\n"
    )
    monkeypatch.chdir(here)
    assert shoal("run", small, "--set", 'sharing={name="mine.py:Mine"}').code == 0
