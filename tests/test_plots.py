"""Plots of several runs: the split on the axis, and the keys in the legend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from shoal.errors import DataError
from shoal.results.plots import metric_figure
from shoal.results.records import Evaluation, RecordFile, RunFolder


def made(root: Path, **tables: Any) -> RunFolder:
    """Create the folder of a run with one score."""
    folder = RunFolder.create(root, "made")
    folder.experiment.write_text(tomli_w.dumps(tables))
    file = RecordFile(folder.node(0))
    file.write(Evaluation(0, 1.0, {"accuracy": 0.5}))
    file.close()
    return folder


def test_a_figure_names_the_split_and_shows_one_only(tmp_path: Path) -> None:
    test, validated = (made(tmp_path, evaluation={"split": split}) for split in ("test", "validation"))
    assert metric_figure([test], "accuracy").axes[0].get_ylabel() == "test accuracy"
    assert metric_figure([validated], "accuracy").axes[0].get_ylabel() == "validation accuracy"
    with pytest.raises(DataError, match="different splits, test and validation: plot those of each split"):
        metric_figure([test, validated], "accuracy")
