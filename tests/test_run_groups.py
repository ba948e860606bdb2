"""Groups of runs that differ only in the seed, and their labels."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from shoal.results.groups import group_runs
from shoal.results.records import RunFolder

FULL, CHOCO = {"name": "full"}, {"name": "choco", "gamma": 0.5}


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def run(**tables: Any) -> RunFolder:
        folder = RunFolder.create(tmp_path, "folder")
        folder.experiment.write_text(tomli_w.dumps({"name": "made", **tables}))
        return folder

    return run


def test_runs_that_differ_in_the_seed_are_one_group(made: Any) -> None:
    runs = [made(seed=seed, sharing=sharing) for seed in (1, 2) for sharing in (FULL, CHOCO)]
    again = made(seed=2, sharing=FULL, simulation={"workers": 4})
    groups = group_runs([*runs, again])
    assert [group.label for group in groups] == ["sharing = full", "sharing = choco"]
    assert [group.settings for group in groups] == [{"sharing.name": "full"}, {"sharing.name": "choco"}]
    assert [group.runs for group in groups] == [(runs[0], runs[2], again), (runs[1], runs[3])]


def test_a_group_alone_has_the_name_of_the_experiment(made: Any, tmp_path: Path) -> None:
    assert [group.label for group in group_runs([made(seed=1), made(seed=2)])] == ["made"]
    assert [group.label for group in group_runs([RunFolder.create(tmp_path, "no-experiment")])] == ["no-experiment"]
    assert group_runs([]) == []


def test_options_distinguish_groups_that_have_the_same_component(made: Any) -> None:
    topk = [made(sharing={"name": "topk", "alpha": alpha}) for alpha in (0.1, 0.2)]
    assert [group.label for group in group_runs([made(sharing=FULL), *topk])] == [
        "sharing = full", "sharing = topk, sharing.alpha = 0.1", "sharing = topk, sharing.alpha = 0.2",
    ]  # fmt: skip


def test_labels_are_short_unique_and_not_paths(made: Any) -> None:
    paths = [made(dataset={"name": "arrays", "path": f"/home/{user}/data"}) for user in ("a", "b")]
    assert [group.label for group in group_runs(paths)] == ["dataset.path = data (1)", "dataset.path = data (2)"]
    long = [made(fault=[{"at": 1.0, "crash": list(range(200, 200 + n))}]) for n in (30, 31)]
    labels = [group.label for group in group_runs(long)]
    assert len(set(labels)) == 2
    assert all(len(label) < 60 for label in labels)


def test_runs_of_different_plugin_code_are_different_groups(made: Any) -> None:
    plugin = {"name": "plugins/half.py:Half"}
    runs = [made(sharing=plugin, plugins={"plugins/half.py": code * 64}) for code in "ab"]
    assert [group.label for group in group_runs(runs)] == ["half.py = aaaaaaaa", "half.py = bbbbbbbb"]
    assert [group.label for group in group_runs([made(sharing=FULL), runs[0]])] == [
        "sharing = full", "sharing = half.py:Half",
    ]  # fmt: skip


def test_different_versions_are_a_warning_that_names_them(made: Any) -> None:
    old, new = (made(versions={"shoal": version, "torch": "2.4"}) for version in ("0.1.0", "0.2.0"))
    with pytest.warns(UserWarning, match=r"different versions of shoal: 0\.1\.0, 0\.2\.0"):
        assert len(group_runs([old, new])) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group_runs([new, new])


def labels_of(folders: list[RunFolder]) -> list[str]:
    return [group.label for group in group_runs(folders)]


def test_labels_name_keys_that_only_some_runs_have(made: Any) -> None:
    def run(sharing: dict[str, Any], **dataset: Any) -> RunFolder:
        folder: RunFolder = made(dataset={"name": "digits", **dataset}, sharing=sharing)
        return folder

    plain = run(FULL)
    assert labels_of([plain, run(FULL, validation=0.1)]) == ["dataset.validation = none", "dataset.validation = 0.1"]
    images = run(FULL, name="cifar10", path="x", augmentation=[{"name": "flip"}])
    assert labels_of([plain, images])[0] == "dataset = digits, dataset.augmentation = none", "without keys of cifar10"
    assert labels_of([plain, run(CHOCO)]) == ["sharing = full", "sharing = choco"], "without the options of choco"
    assert labels_of([run(CHOCO), run({**CHOCO, "every": 2})]) == ["sharing.every = none", "sharing.every = 2"]
