"""How many nodes fit on a machine."""

from __future__ import annotations

import pytest

from shoal.engines.operating_system import MIB, available_memory
from shoal.engines.processes import capacity
from shoal.engines.processes.capacity import KeptMemory, check_capacity, kept_memory, memory_warning
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


def test_models_of_many_neighbours_that_do_not_fit_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory", lambda: 8 * 2**30)
    assert memory_warning(256, 1000, 255) is None
    assert memory_warning(256, 90_000, 5) is None
    warning = memory_warning(256, 90_000, 255)
    assert warning is not None
    assert "a node has 255 neighbours on average" in warning
    assert "256 nodes may need 26.3 GiB, and 8.0 GiB are free" in warning


def test_nodes_keep_the_memory_of_trainings_only_where_it_is_plentiful() -> None:
    kept = kept_memory(1, 1000, MIB)
    assert kept.most > MIB
    assert 0 < kept.min_free < available_memory()
    assert kept_memory(1, 1000, available_memory()) == KeptMemory()
    assert kept_memory(10**6, 1000, MIB) == KeptMemory()
