"""The template, from which a process that makes many runs forks their zygotes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal
from conftest import is_template, until
from shoal.engines.processes import control
from shoal.engines.processes.launch import TEMPLATES
from shoal.engines.processes.template_process import ZygoteTemplates
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.errors import ExperimentError, RunError
from shoal.results.records import Event, RunFolder

if sys.platform != "linux":
    pytest.skip("templates need Linux", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]

MODELS = '''
"""A model that writes what its process got from the process that started the run, and a model that raises an error."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import psutil

from shoal.models.basic import Logistic


class Observed(Logistic):
    def build(self, shape, outputs):
        got = {
            "parent": psutil.Process().ppid(),
            "folder": os.getcwd(),
            "path": sys.path,
            "session": os.getsid(0) == os.getpid(),
            "draws": np.random.rand(2).tolist(),
        }
        Path(os.environ["SHOAL_OBSERVED"]).write_text(json.dumps(got))
        return super().build(shape, outputs)


class Raises(Logistic):
    def build(self, shape, outputs):
        raise RuntimeError("no such layer")
'''


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "zygotes")


@pytest.fixture
def ready(folder: RunFolder) -> psutil.Process:
    """The template of the runs of this process, which has imported everything."""
    return make_ready(TEMPLATES, folder)


@pytest.fixture
def own_templates() -> Iterator[ZygoteTemplates]:
    templates = ZygoteTemplates()
    yield templates
    templates.close()


def make_ready(templates: ZygoteTemplates, folder: RunFolder) -> psutil.Process:
    """Start two zygotes, as two runs do, and wait for the template."""
    for _ in range(2):
        ZygoteProcess(folder, templates).close()
    until(lambda: templates.is_ready)
    with started(folder, templates) as zygote:
        return psutil.Process(zygote.pid).parent()


@contextmanager
def started(folder: RunFolder, templates: ZygoteTemplates = TEMPLATES) -> Iterator[ZygoteProcess]:
    zygote = ZygoteProcess(folder, templates)
    try:
        yield zygote
    finally:
        zygote.close()


def is_forked(folder: RunFolder, templates: ZygoteTemplates = TEMPLATES) -> bool:
    """Whether a zygote that is started now is forked from a template."""
    with started(folder, templates) as zygote:
        return is_template(psutil.Process(zygote.pid).parent())


def templates_of(process: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(process).children() if is_template(child)]


# When a template is used


def test_the_second_run_starts_a_template_and_the_third_uses_it(
    own_templates: ZygoteTemplates, folder: RunFolder
) -> None:
    before = len(templates_of(os.getpid()))
    assert not is_forked(folder, own_templates)
    assert len(templates_of(os.getpid())) == before
    assert not is_forked(folder, own_templates)
    assert len(templates_of(os.getpid())) == before + 1
    assert not is_forked(folder, own_templates), "no run waits for the template"
    until(lambda: own_templates.is_ready)
    assert is_forked(folder, own_templates)


def change_umask() -> Callable[[], object]:
    before = os.umask(0o077)
    return lambda: os.umask(before)


def change_limit() -> Callable[[], object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (2**22, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def change_ignored_signals() -> Callable[[], object]:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR2, before)


def change_a_variable_of_python() -> Callable[[], object]:
    os.environ["PYTHONHASHSEED"] = "3"
    return lambda: os.environ.pop("PYTHONHASHSEED")


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("change", [change_umask, change_limit, change_ignored_signals, change_a_variable_of_python])
def test_a_zygote_that_must_inherit_something_else_is_not_forked(
    change: Callable[[], Callable[[], object]], folder: RunFolder
) -> None:
    restore = change()
    try:
        assert not is_forked(folder)
    finally:
        restore()
    assert is_forked(folder)


@pytest.mark.usefixtures("ready")
def test_another_thread_and_a_forked_process_do_not_use_the_template(folder: RunFolder) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(is_forked(folder)))
    thread.start()
    thread.join()
    assert found == [False]
    if not (child := os.fork()):
        forked = True
        try:
            forked = TEMPLATES.fork(0, 1) is not None
            TEMPLATES.close()
        finally:
            os._exit(forked)
    assert os.waitpid(child, 0)[1] == 0
    assert is_forked(folder)


@pytest.mark.usefixtures("ready")
def test_a_run_during_another_run_does_not_use_the_template(folder: RunFolder) -> None:
    with started(folder) as first:
        assert not is_forked(folder)
        assert first.is_running
    assert is_forked(folder)


# Runs


def experiment(model: str, base: Path) -> shoal.Experiment:
    (base / "models.py").write_text(MODELS)
    return shoal.Experiment(
        nodes=2,
        seed=1,
        engine="processes",
        algorithm={"name": "dpsgd", "rounds": 1},
        model=f"models.py:{model}",
        base=base,
    )


def test_runs_that_use_the_template_get_what_the_process_has_now(
    ready: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, draws = set(), []
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        monkeypatch.chdir(tmp_path / run)
        monkeypatch.syspath_prepend(tmp_path / run)
        monkeypatch.setenv("SHOAL_OBSERVED", str(tmp_path / f"{run}.json"))
        digests.add(experiment("Observed", tmp_path).run(tmp_path).summary["digest"])
        got: dict[str, Any] = json.loads((tmp_path / f"{run}.json").read_text())
        draws.append(got.pop("draws"))
        path = [str(entry) for entry in sys.path]
        assert got == {"parent": ready.pid, "folder": str(tmp_path / run), "path": path, "session": True}
    assert draws[0] != draws[1], "the global generator of NumPy has no fixed seed"
    simulated = dataclasses.replace(experiment("Observed", tmp_path), engine="simulation")
    assert digests == {simulated.run(tmp_path).summary["digest"]}


def test_the_error_of_a_run_is_reported(ready: psutil.Process, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="no such layer"):
        experiment("Raises", tmp_path).run(tmp_path)
    assert is_template(ready)


def test_runs_leave_no_file_open_and_no_process(ready: psutil.Process, tmp_path: Path) -> None:
    quick = experiment("Logistic", tmp_path)
    quick.run(tmp_path)
    until(lambda: not ready.children())
    before = psutil.Process().num_fds(), ready.num_fds()
    for _ in range(5):
        quick.run(tmp_path)
    until(lambda: not ready.children())  # zombies too
    assert (psutil.Process().num_fds(), ready.num_fds()) == before


# Failures


def test_a_zygote_that_was_killed_or_stopped_is_noticed(ready: psutil.Process, folder: RunFolder) -> None:
    with started(folder) as zygote:
        process = psutil.Process(zygote.pid)
        zygote.send(control.RecordEvents([(0, Event("fault", 1.0, "x"))]))
        until(folder.node(0).exists)
        process.suspend()
        until(lambda: zygote.is_stopped)
        process.resume()
        until(lambda: not zygote.is_stopped)
        process.kill()
        until(lambda: not zygote.is_running)
        with pytest.raises(RunError, match="exited unexpectedly"):
            zygote.receive()
        assert process.status() == psutil.STATUS_ZOMBIE, "its id is reserved"
    until(lambda: not ready.children())


def test_the_zygote_ends_with_its_template_and_the_next_run_works(ready: psutil.Process, folder: RunFolder) -> None:
    with started(folder) as zygote:
        ready.kill()
        until(lambda: not zygote.is_running)
        with pytest.raises(RunError, match="exited unexpectedly"):
            zygote.receive()
        zygote.kill()
    assert not is_forked(folder)
    until(lambda: TEMPLATES.is_ready)
    assert is_forked(folder)


def test_a_template_that_does_not_answer_is_ended(own_templates: ZygoteTemplates, folder: RunFolder) -> None:
    template = make_ready(own_templates, folder)
    template.suspend()
    assert not is_forked(folder, own_templates)
    assert not template.is_running()


def test_a_template_that_ended_before_it_was_ready_is_not_replaced(
    own_templates: ZygoteTemplates, folder: RunFolder
) -> None:
    before = set(templates_of(os.getpid()))
    for _ in range(2):
        ZygoteProcess(folder, own_templates).close()
    (template,) = set(templates_of(os.getpid())) - before
    template.kill()
    until(lambda: template.status() == psutil.STATUS_ZOMBIE)
    for _ in range(3):
        assert not is_forked(folder, own_templates)
    assert set(templates_of(os.getpid())) == before


class Interrupted(BaseException):
    """As a signal handler may raise it."""


NO_FILE = OSError(errno.EMFILE, "Too many open files")


def fail(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> None:
        raise error

    return function


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("error", [NO_FILE, Interrupted()])
def test_an_error_at_the_start_of_a_run_does_not_end_the_template_of_another_run(
    error: BaseException, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(folder) as first:
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", fail(error))
            assert TEMPLATES.fork(0, 1) is None
        assert first.is_running
    assert is_forked(folder)


def test_an_error_before_a_request_does_not_end_the_template(
    ready: psutil.Process, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail(NO_FILE))
        assert TEMPLATES.fork(0, 1) is None
        patch.setattr(os, "listdir", fail(Interrupted()))
        with pytest.raises(Interrupted):
            TEMPLATES.fork(0, 1)
    with started(folder) as zygote:
        assert psutil.Process(zygote.pid).parent() == ready


def test_a_zygote_that_cannot_be_used_is_not_left(
    ready: psutil.Process, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", fail(NO_FILE))
        with pytest.raises(OSError, match="Too many open files"):
            ZygoteProcess(folder, TEMPLATES)
    with monkeypatch.context() as patch:
        patch.setattr(ZygoteProcess, "begin", fail(Interrupted()))
        with pytest.raises(Interrupted):
            ZygoteProcess(folder, TEMPLATES)
    until(lambda: not ready.children())
    assert is_forked(folder)


def test_a_working_folder_that_was_removed(
    own_templates: ZygoteTemplates, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ready(own_templates, folder)
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert not is_forked(folder, own_templates)


OWNER = """
import os
import signal
from pathlib import Path
import shoal
from shoal.engines.processes.launch import TEMPLATES
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.results.records import RunFolder
from conftest import until

folder = RunFolder.create(Path("."), "zygotes")
for _ in range(2):
    ZygoteProcess(folder, TEMPLATES).close()
until(lambda: TEMPLATES.is_ready)
"""
KILLED = """
experiment = shoal.Experiment(nodes=2, engine="processes", algorithm={"name": "dpsgd", "rounds": 1000})
experiment.run(on_round=lambda report: os.kill(os.getpid(), signal.SIGKILL))
"""
ENDS = {
    "it ends": ("", 0),
    "it raises an error": ("zygote = ZygoteProcess(folder, TEMPLATES)\n1 / 0", 1),
    "it is killed during a run": (KILLED, -signal.SIGKILL),
}


@pytest.mark.parametrize("end", ENDS)
def test_no_template_and_no_zygote_outlives_the_process_that_started_it(end: str, tmp_path: Path) -> None:
    """The fixture finds zygotes that are left, and templates without their parent."""
    program, code = ENDS[end]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", OWNER + program]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "is still running" not in done.stderr
