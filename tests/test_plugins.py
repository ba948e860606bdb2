"""Plug-ins: where they are found, and which ones are rejected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from experiment_tables import PLUGIN, problems
from shoal.experiment import Experiment


def test_a_plugin_file_is_found_beside_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(PLUGIN)
    (tmp_path / "e.toml").write_text('algorithm = { name = "plugins/mine.py:Mine", alpha = 0.2 }')
    monkeypatch.chdir("/")
    experiment = Experiment.from_file(tmp_path / "e.toml")
    assert experiment.algorithm.build().alpha == 0.2
    assert experiment.algorithm.name == f"{tmp_path / 'plugins' / 'mine.py'}:Mine", (
        "absolute, since nodes may start in another folder"
    )
    assert Experiment.from_table(experiment.to_table()) == experiment


def test_a_plugin_in_a_module_is_found_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_shoal_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = Experiment.from_table({"algorithm": {"name": "my_shoal_plugin:Mine"}})
    assert type(experiment.algorithm.build()).__module__ == "my_shoal_plugin"
    monkeypatch.delitem(sys.modules, "my_shoal_plugin")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("none.py:Mine", {}, "there is no file '{base}/none.py'"),
        ("raises.py:Mine", {}, "'{base}/raises.py' raised on import: KeyError: 'a key'"),
        ("leaves.py:Mine", {}, "'{base}/leaves.py' raised on import: SystemExit: 4"),
        ("syntax.py:Mine", {}, "'{base}/syntax.py' raised on import: SyntaxError: "),
        ("mine.py:Mime", {}, "{base}/mine.py has no class 'Mime'; did you mean 'Mine'?"),
        ("mine.py:function", {}, "{base}/mine.py has no class 'function'; expected one of Mine"),
        ("nowhere.at_all:Mine", {}, "importing 'nowhere.at_all' failed: ModuleNotFoundError"),
        ("mine.py:Mine", {"alhpa": 1}, "algorithm.alhpa: unknown key; did you mean 'alpha'?"),
        ("mine.py:Mine", {"alpha": 2}, "algorithm.alpha = 2: expected number at least 0 and at most 1"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_rejected(
    name: str, options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "raises.py").write_text("raise KeyError('a key')")
    (tmp_path / "leaves.py").write_text("raise SystemExit(4)")
    (tmp_path / "syntax.py").write_text("def (:")
    (found,) = problems({"algorithm": {"name": name, **options}}, base=tmp_path)
    assert problem.format(base=tmp_path) in found
