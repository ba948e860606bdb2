"""How many nodes fit on a machine."""

from __future__ import annotations

import pytest

from shoal.engines.processes.capacity import check_capacity
from shoal.errors import LaunchError

TOO_LARGE = 10**12


@pytest.mark.parametrize(
    ("services", "shown"),
    [(0, r"nodes = 100: "), (1, r"nodes = 100 and 1 service node: "), (2, r"nodes = 100 and 2 service nodes: ")],
)
def test_an_error_names_training_nodes_and_service_nodes(services: int, shown: str) -> None:
    with pytest.raises(LaunchError, match=f"^{shown}about 0 nodes with a model of 1,000,000,000,000 parameters fit"):
        check_capacity(100, services, TOO_LARGE)


def test_one_node_with_a_small_model_fits() -> None:
    check_capacity(1, 0, 1000)
