"""Every sharing gives the same models on both engines, and every component names its source."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import models_of
from shoal.algorithms import ALGORITHMS
from shoal.experiment import Experiment
from shoal.experiment.registry import REGISTRIES, components
from shoal.sharing import SHARINGS

EXAMPLES = Path(__file__).parent.parent / "examples"
OPTIONS: dict[str, dict[str, Any]] = {"data": {"samples": 3}, "jwins": {"fractions": [0.2]}}
WITHOUT_PAPER = {"full", "float16", "bfloat16", "int8", "float32", "zstd", "blosc2", "raw", "bitmap"}
"""Components without a paper: standard number formats and libraries."""


def experiment(**changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 5,
        "seed": 4,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "topology": {"name": "ring"},
        "partition": {"name": "shards", "per_node": 2},
        "model": {"name": "mlp"},
        "training": {"lr": 0.1, "batch_size": 16},
        "evaluation": {"every": 0},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


@pytest.mark.parametrize("name", SHARINGS)
def test_every_sharing_gives_the_same_models_on_both_engines(name: str, tmp_path: Path) -> None:
    table = {"name": name, **OPTIONS.get(name, {})}
    simulated = experiment(sharing=table).run(tmp_path)
    real = experiment(sharing=table, engine="processes").run(tmp_path)
    assert real.status == simulated.status == "completed"
    assert real.summary["messages_rejected"] == simulated.summary["messages_rejected"] == 0
    assert real.summary["bytes_sent"] == simulated.summary["bytes_sent"]
    assert np.array_equal(models_of(real), models_of(simulated))


def test_every_algorithm_and_sharing_is_in_an_example() -> None:
    texts = {file.name: file.read_text() for file in EXAMPLES.glob("*.toml")}
    for name in [*ALGORITHMS, *SHARINGS]:
        assert any(re.search(rf'name ?= ?"{name}"|name={name}\b', text) for text in texts.values()), name


def test_examples_begin_with_a_comment_and_contain_the_command_that_runs_them() -> None:
    for file in EXAMPLES.glob("*.toml"):
        first = file.read_text().splitlines()[0]
        assert first.startswith("# "), file.name
        assert re.search(rf"shoal (run|sweep) examples/{file.name}", file.read_text()), file.name
        assert tomllib.loads(file.read_text())["name"] == file.stem


@pytest.mark.parametrize("kind", ["algorithm", "sharing", "values", "indices"])
def test_the_first_line_of_a_docstring_names_the_paper(kind: str) -> None:
    assert kind in REGISTRIES
    for name, cls in components(kind):
        first = (cls.__doc__ or "").strip().splitlines()[0]
        assert first.endswith("."), (name, first)
        if name not in WITHOUT_PAPER:
            assert re.search(r"\b(19|20)\d\d\b", first), (name, first)
