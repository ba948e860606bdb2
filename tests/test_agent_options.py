"""Options of `shoal run` and `shoal agent` for several machines that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from conftest import CommandResult

Shoal: TypeAlias = Callable[..., CommandResult]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--agents", "10.0.0.1:7700"], "keys, which are optional only on loopback addresses"),
        (["--agents", "nowhere"], "'nowhere': expected an address HOST:PORT"),
        (["--agents", "missing.toml"], "'missing.toml' cannot be read"),
        (["--agents", "wrong.toml"], "did you mean 'address'"),
        (["--listen", "127.0.0.1:0"], "'listen' and 'expect' belong together"),
        (["--expect", "2"], "need --agents or --listen"),
        (["--agents", "127.0.0.1:7700", "--engine", "simulation"], "agents run processes"),
        (["--agents", "127.0.0.1:7700", "--key", "absent.key_secret"], "absent.key_secret' is missing"),
        (["--agents", "127.0.0.1:7700", "--set", "processes.shaping=kernel"], "works on one machine only"),
    ],
)
@pytest.mark.usefixtures("small")
def test_wrong_options_are_rejected_before_anything_starts(
    tmp_path: Path, shoal: Shoal, arguments: list[str], problem: str
) -> None:
    (tmp_path / "wrong.toml").write_text('[[agent]]\nadress = "127.0.0.1:7700"\n')
    failed = shoal("run", "small.toml", "--engine", "processes", *arguments)
    assert failed.code == 2, failed
    assert problem in " ".join(failed.err.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--listen", "10.0.0.1:7700"], "keys, which are optional only on loopback addresses"),
        (["--listen", "127.0.0.1"], "expected an address HOST:PORT"),
        (["--join", "127.0.0.1:70000"], "expected an address HOST:PORT"),
        (["--listen", "127.0.0.1:7700", "--trust", "absent"], "absent' is missing"),
        (
            ["--listen", "192.0.2.1:7700", "--key", "k.key_secret", "--trust", "k.key"],
            "cannot listen at 192.0.2.1:7700",
        ),
    ],
)
def test_wrong_options_of_an_agent_are_rejected(shoal: Shoal, arguments: list[str], problem: str) -> None:
    assert shoal("keys", "make", ".", "--name", "k").code == 0
    failed = shoal("agent", *arguments)
    assert failed.code == 2, failed
    assert problem in " ".join(failed.err.split())
