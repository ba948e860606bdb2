"""Experiments with faults, and random fault schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from shoal.environment.faults import FaultEvent, fault_events
from shoal.errors import ExperimentError
from shoal.experiment import Experiment

NODES = 8
SERVED = {"algorithm": {"name": "fedavg"}}
SERVER = NODES


def experiment(*faults: dict[str, Any], **more: Any) -> Experiment:
    return Experiment.from_table({"nodes": NODES, "fault": list(faults), **more})


def problems(*faults: dict[str, Any], **more: Any) -> tuple[str, ...]:
    with pytest.raises(ExperimentError) as error:
        experiment(*faults, **more)
    return error.value.problems


def expanded(*faults: dict[str, Any], seed: int = 0, **more: Any) -> Iterator[FaultEvent]:
    described = experiment(*faults, **more)
    return fault_events(described.fault, NODES, described.size, seed)


CRASH = {"kind": "crash", "node": 3}
AT = {"kind": "crash", "node": 3, "time": 10.0}
CUT = {"kind": "partition", "nodes": "0-3", "time": 10.0}
DRAWN = {"kind": "crash", "every": 60.0}
RESTART = {"kind": "restart", "node": 3, "time": 30.0}


KINDS = st.sampled_from(["crash", "raise", "hang", "restart", "partition", "repair", "hold", "release", "slow", "drop"])
TIMES = st.floats(0, 100)


@st.composite
def tables(draw: st.DrawFn, kinds: st.SearchStrategy[str] = KINDS) -> dict[str, Any]:
    """A timed fault that is valid by itself."""
    kind = draw(kinds)
    table: dict[str, Any] = {"kind": kind}
    named = draw(st.sets(st.integers(0, NODES - 1), min_size=1, max_size=NODES - 1))
    between = kind in ("partition", "repair", "hold", "release", "drop")
    random_fault = draw(st.booleans()) or kind in ("restart", "repair", "release")
    if draw(st.booleans()) or not (between or random_fault):
        table["nodes"] = ", ".join(map(str, sorted(named)))
        if between and draw(st.booleans()):
            table["others"] = ", ".join(str(node) for node in range(NODES) if node not in named)
    if random_fault:
        table |= {"every": draw(st.floats(0.5, 50)), "after": draw(TIMES), "count": draw(st.integers(1, 6))}
        if draw(st.booleans()):
            table["before"] = table["after"] + draw(st.floats(1, 50))
    else:
        table["time"] = draw(TIMES)
    if kind in ("crash", "partition", "hold", "slow", "drop"):
        end = draw(st.sampled_from(["never", "lasting", "until"]))
        if end == "lasting":
            table["lasting"] = draw(st.floats(0.5, 50))
        elif end == "until":
            table["until"] = table.get("before", table.get("time", table.get("after"))) + draw(st.floats(1, 50))
    if between and draw(st.booleans()):
        table["oneway"] = draw(st.booleans())
    if kind == "slow":
        table |= {"factor": draw(st.floats(0.1, 10)), "what": draw(st.sampled_from(["compute", "network", "both"]))}
    if kind == "drop":
        table["probability"] = draw(st.floats(0.01, 1))
    return table


SCHEDULES = st.lists(tables(), max_size=5)
