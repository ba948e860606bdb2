"""Components of an experiment that are given as instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.algorithms.fedavg import FedAvg
from shoal.algorithms.support.server_optimizers import Adam
from shoal.compression.floats import Float16
from shoal.experiment import Experiment
from shoal.sharing.topk import TopK

RENAMED = """
from dataclasses import dataclass
from typing import Annotated

from shoal.compression.floats import Float32
from shoal.schema import FormerOption, Nested
from shoal.sharing.topk import TopK


@dataclass
class Renamed(TopK):
    values: Annotated[object, Nested("values"), FormerOption("numbers")] = Float32()
"""


@pytest.mark.parametrize("values", [Float16(), "float16", {"name": "float16"}], ids=["instance", "name", "table"])
def test_a_component_inside_an_instance_is_an_instance_a_name_or_a_table(values: Any) -> None:
    experiment = Experiment(sharing=TopK(values=values))
    assert experiment.sharing.build() == TopK(values=Float16())
    assert experiment == Experiment(sharing={"name": "topk", "values": "float16"})
    assert Experiment.from_table(experiment.to_table()) == experiment


def test_a_component_inside_a_component_may_have_its_former_name(tmp_path: Path) -> None:
    (tmp_path / "renamed.py").write_text(RENAMED)
    sharing = {"name": "renamed.py:Renamed", "numbers": "float16"}
    with pytest.warns(FutureWarning, match=r"sharing\.numbers = 'float16': .* write values = 'float16'") as warned:
        experiment = Experiment.from_table({"sharing": sharing}, base=tmp_path)
    assert len(warned) == 1
    assert experiment.sharing.build().values == Float16()


@pytest.mark.parametrize("server", [Adam(), "adam", {"name": "adam"}], ids=["instance", "name", "table"])
def test_the_server_optimizer_of_an_instance_is_an_instance_a_name_or_a_table(server: Any) -> None:
    experiment = Experiment(algorithm=FedAvg(server=server))
    assert experiment.algorithm.build().server == Adam()
    assert experiment == Experiment(algorithm={"name": "fedavg", "server": {"name": "adam"}})
