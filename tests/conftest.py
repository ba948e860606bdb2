"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shoal.cli import main

# How long an example takes says how busy the machine is.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

SMALL = """
name       = "small"
nodes      = 6
seed       = 1
algorithm  = { name = "dpsgd", rounds = 4 }
topology   = { name = "regular", degree = 3, dynamic = true }
dataset    = { name = "digits", partition = { name = "shards", per_node = 2 } }
training   = { lr = 0.1, batch_size = 16, local_steps = 2 }
evaluation = { every = 2 }
simulation = { batching = "off" }
"""


@dataclass(frozen=True)
class Said:
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """An experiment that takes a moment."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


@pytest.fixture
def shoal(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """The command line, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        return Said(int(ended.value.code or 0), *capfd.readouterr())

    return run
