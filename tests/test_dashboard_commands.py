"""`shoal serve` and `shoal run --watch`."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dashboard_runs import WrittenRun
from dashboard_server import CLIENT, wait_for
from shoal.cli import main
from shoal.dashboard import serving

EXPERIMENT = """
name = "watched"
nodes = 4
engine = "simulation"
algorithm = { name = "dpsgd", rounds = 3 }
topology = { name = "ring" }
dataset = { name = "digits" }
model = { name = "logistic" }
simulation = { batching = "off" }
"""


def shoal(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "shoal", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_url(process: subprocess.Popen[str], before: str) -> str:
    """Read output until a line that begins with `before`, and return the address in it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(before):
            return re.findall(r"http://\S+", line)[0]
    raise AssertionError(f"no line begins with {before!r}")


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_serve_shows_runs_until_ctrl_c(tmp_path: Path) -> None:
    WrittenRun(tmp_path / "a", "first").finish()
    process = shoal("serve", tmp_path, "--port", 0)
    url = read_url(process, "runs in")
    assert [run["name"] for run in CLIENT.get(f"{url}api/runs").json()] == ["first"]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) in (0, 130)


def test_serve_with_a_token_prints_it(tmp_path: Path) -> None:
    process = shoal("serve", tmp_path, "--port", 0, "--token")
    url = read_url(process, "runs in")
    assert CLIENT.get(f"{url.split('?')[0]}api/runs").status_code == 401
    assert CLIENT.get(url, follow_redirects=True).status_code == 200
    process.terminate()
    process.wait(20)


def test_a_folder_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no folder" in error_of(["serve", str(tmp_path / "missing")], capsys)


def test_a_chosen_port_that_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = error_of(["serve", str(tmp_path), "--port", str(port)], capsys)
    assert f"port {port}: Address already in use" in error
    assert "--port" in error


def test_without_a_chosen_port_the_next_free_one_is_used() -> None:
    first = serving.bind("127.0.0.1", None)
    second = serving.bind("127.0.0.1", None)
    with first.socket, second.socket:
        assert first.url != second.url


@pytest.mark.parametrize("host", ["no such host", "203.0.113.7", "a" * 70])
def test_a_host_that_is_not_this_machine(tmp_path: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert host in error_of(["serve", str(tmp_path), "--host", host], capsys)


def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    error = error_of(["serve", str(tmp_path)], capsys)
    assert "starlette" in error
    assert "pip install 'shoal[dashboard]'" in error


def test_watch_shows_the_run_until_ctrl_c_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('a module of the working folder was imported')")
    monkeypatch.chdir(tmp_path)
    process = shoal("run", tmp_path / "e.toml", "--out", tmp_path / "runs", "--watch")
    url = read_url(process, "watch the run")
    children = psutil.Process(process.pid).children(recursive=True)
    assert CLIENT.get(url).status_code == 200
    ended = read_url(process, "the run has ended")
    [run] = CLIENT.get(f"{url.split('#')[0]}api/runs").json()
    assert (run["name"], run["status"]) == ("watched", "completed")
    assert 0 <= run["created"] - int(url.rpartition("#/started/")[2]) < 60, "the page waits for this run"
    assert ended.endswith(run["id"].replace("/", "%2F"))
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    wait_for(lambda: not any(child.is_running() for child in children))


def test_the_page_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    process = shoal("run", tmp_path / "e.toml", "--out", tmp_path / "runs", "--watch")
    read_url(process, "watch the run")
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.kill()
    process.wait(20)
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))


def test_a_wrong_experiment_starts_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace("nodes = 4", "nodes = 0"))
    error_of(["run", str(tmp_path / "e.toml"), "--watch", "--out", str(tmp_path / "runs")], capsys)
    assert not (tmp_path / "runs").exists()
