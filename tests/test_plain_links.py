"""Links that other machines can reach must be sealed, unless the experiment accepts plain ones."""

from __future__ import annotations

from typing import Any

import pytest

from experiment_tables import problems
from shoal.experiment import Experiment
from shoal.sharing.full import FullSharing
from shoal.traits import Traits

LOOPBACK = ["127.0.0.1", "127.0.0.2", "127.1.2.3", "localhost", "::1", "[::1]"]
REACHABLE = [
    *("10.0.0.5", "192.168.1.2", "8.8.8.8", "0.0.0.0", "*", "::", "[fe80::1]"),
    *("eth0", "lo", "127.1", "node.example"),  # names are not looked up
]


def table(engine: str = "processes", sharing: str = "full", **processes: Any) -> dict[str, Any]:
    return {
        "engine": engine,
        "topology": {"name": "regular", "degree": 4},
        "sharing": {"name": sharing},
        "processes": processes,
    }


def plain(key: str, address: str) -> str:
    return (
        f"processes.{key} = {address!r}: other machines can read plain links, and send messages to nodes; set "
        "processes.sealed = true, or use '127.0.0.1', or set processes.allow_unsealed = true to accept it"
    )


SECURE = (
    "sharing = 'secure': it does not hide models from those who can read the links; set processes.sealed = true, or "
    "processes.allow_unsealed = true to accept it"
)


@pytest.mark.parametrize("host", REACHABLE)
def test_plain_links_that_other_machines_can_reach_are_rejected(host: str) -> None:
    assert problems(table(host=host, announce="127.0.0.1")) == (plain("host", host),)
    assert problems(table(announce=host)) == (plain("announce", host),)


def test_secure_aggregation_on_such_links_is_rejected_too() -> None:
    assert problems(table(sharing="secure", host="10.0.0.5")) == (plain("host", "10.0.0.5"), SECURE)


def test_secure_aggregation_of_a_group_is_rejected_too() -> None:
    some = {**table(host="10.0.0.5"), "group": [{"nodes": "3-5", "sharing": {"name": "secure"}}]}
    assert problems(some) == (plain("host", "10.0.0.5"), SECURE)


class Hiding(FullSharing):
    traits = Traits(sends_whole_models=True, needs_private_links=True)


def test_a_plug_in_that_needs_private_links_is_rejected_too() -> None:
    some = {**table(host="10.0.0.5"), "sharing": {"name": f"{__name__}:Hiding"}}
    assert problems(some) == (plain("host", "10.0.0.5"), SECURE.replace("secure'", f"{__name__}:Hiding'"))


def test_a_group_with_an_error_is_reported_together_with_plain_links() -> None:
    found = problems({**table(host="10.0.0.5"), "group": [{"nodes": "99"}]})
    assert len(found) == 2
    assert plain("host", "10.0.0.5") in found


@pytest.mark.parametrize("sharing", ["full", "secure"])
@pytest.mark.parametrize(
    "processes",
    [
        *({"host": host} for host in LOOPBACK),
        *({"announce": host} for host in LOOPBACK),
        {"shaping": "kernel"},
        {"host": "10.0.0.5", "sealed": True},
        {"host": "10.0.0.5", "allow_unsealed": True},
        {"host": "10.0.0.5", "sealed": True, "allow_unsealed": True},
        {"allow_unsealed": True},
    ],
    ids=str,
)
def test_sealed_links_the_loopback_and_accepted_plain_links_are_possible(processes: Any, sharing: str) -> None:
    experiment = Experiment.from_table(table(sharing=sharing, **processes))
    assert experiment.processes.allow_unsealed == processes.get("allow_unsealed", False)


def test_the_simulation_has_no_links() -> None:
    assert Experiment.from_table(table("simulation", "secure", host="10.0.0.5")).engine == "simulation"
