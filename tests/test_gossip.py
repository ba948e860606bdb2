"""Gossip learning: one model per period to one random peer; a receiver merges it by age, and trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import experiment, survives_a_crash
from shoal.algorithms.gossip import MAX_AGE, Gossip
from shoal.errors import ExperimentError
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.testing import FakeRuntime, Faults
from shoal.topologies.static import Full, Ring

LONG = 100.0


def model(sender: int, value: float, age: Any, round: int = 0) -> Message:
    return Message(sender, "model", round, Payload({"params": np.full(2, value, np.float32)}, {"age": age}))


def after_receiving(variant: Any, *messages: Message, periods: int = 2, merge: Any = "age") -> tuple[FakeRuntime, Any]:
    """Run a node with model 2 that gains 1 by training and receives `messages`; it sends its model last."""
    fake = FakeRuntime(*messages)
    node = fake.node(nodes=3, params=np.full(2, 2.0, np.float32), train=lambda params: params + 1)
    fake.run(Gossip(periods, variant, LONG, merge).run(node))
    return fake, node


def last_sent(fake: FakeRuntime) -> tuple[float, int]:
    payload = fake.sent[-1][1].payload
    return float(payload.arrays["params"][0]), int(payload.fields["age"])


# Merging and training


def test_trained_model_replaces_one_that_was_never_trained() -> None:
    assert last_sent(after_receiving("mu", model(1, 8.0, age=3))[0]) == (8.0 + 1, 4)


def test_two_models_that_were_never_trained_have_equal_weights() -> None:
    assert last_sent(after_receiving("mu", model(1, 8.0, age=0))[0]) == (5.0 + 1, 1)


def test_merge_then_update_weighs_by_age() -> None:
    fake, _ = after_receiving("mu", model(1, 8.0, age=2), model(2, 1.0, age=1))
    # 8 of age 2 replaces 2 of age 0, is trained to 9 of age 3; then 9·3/4 + 1·1/4, trained.
    assert last_sent(fake) == (7.0 + 1, 4)


def test_update_then_merge_trains_both() -> None:
    fake, _ = after_receiving("um", model(1, 8.0, age=2))
    # 2 of age 0 becomes 3 of age 1, 8 of age 2 becomes 9 of age 3: 3·1/4 + 9·3/4.
    assert last_sent(fake) == (7.5, 3)


def test_the_plain_average_ignores_ages_and_the_result_has_the_greater_age() -> None:
    fake, _ = after_receiving("mu", model(1, 8.0, age=2), model(2, 1.0, age=9), merge="average")
    # (2 + 8)/2 is trained to 6 of age 3; then (6 + 1)/2 is trained, of age 10.
    assert last_sent(fake) == (3.5 + 1, 10)


def test_update_then_merge_by_the_plain_average() -> None:
    fake, _ = after_receiving("um", model(1, 8.0, age=2), merge="average")
    assert last_sent(fake) == ((3.0 + 9.0) / 2, 3)


def test_without_a_merge_the_received_model_replaces_the_model_even_if_it_is_younger() -> None:
    messages = model(1, 8.0, age=6), model(2, 1.0, age=1)
    assert last_sent(after_receiving("mu", *messages, merge="none")[0]) == (1.0 + 1, 2)
    assert last_sent(after_receiving("rw", *messages)[0]) == (1.0 + 1, 2)


@pytest.mark.parametrize(("variant", "merge"), [("um", "none"), ("rw", "average")])
def test_merges_that_contradict_the_variant_are_rejected(variant: str, merge: str) -> None:
    with pytest.raises(ExperimentError, match=f"merge = '{merge}': variant = '{variant}' .*use variant = 'mu'"):
        experiment({"name": "gossip", "variant": variant, "merge": merge})


def test_a_random_walk_replaces_the_model() -> None:
    fake, _ = after_receiving("rw", model(1, 8.0, age=0), model(2, 1.0, age=6))
    assert last_sent(fake) == (1.0 + 1, 7)


def test_latest_of_several_waiting_models_of_a_peer_counts() -> None:
    fake, _ = after_receiving("rw", model(1, 8.0, age=5, round=0), model(1, 4.0, age=6, round=1))
    assert last_sent(fake) == (4.0 + 1, 7)


def test_models_that_arrive_during_training_are_not_lost() -> None:
    fake = FakeRuntime(model(1, 8.0, age=1)).deliver(model(2, 1.0, age=2), at=0.5)
    node = fake.node(nodes=3, params=np.zeros(2, np.float32), train=lambda params: params + 1)
    fake.run(Gossip(2, "mu", LONG).run(node))
    assert last_sent(fake) == (9 / 2 + 1 / 2 + 1, 3)


@pytest.mark.parametrize("age", [-1, 1.5, True, "old", 2**60, None])
def test_model_without_a_valid_age_is_rejected_and_counted(age: Any) -> None:
    broken = model(1, 8.0, age)
    if age is None:
        broken = Message(1, "model", 0, Payload(broken.payload.arrays))
    fake, node = after_receiving("mu", broken, model(2, 5.0, age=1))
    assert node.rejected_count == 1
    assert last_sent(fake) == (5.0 + 1, 2)


def test_invalid_model_is_rejected_and_counted() -> None:
    fake, node = after_receiving("mu", Message(1, "model", 0, Payload({"params": np.ones(9, np.float32)}, {"age": 3})))
    assert node.rejected_count == 1
    assert last_sent(fake) == (2.0, 0)


# The clock


def test_one_model_per_period_after_a_random_part_of_the_first() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=9, params=np.zeros(2, np.float32), topology=Full())
    fake.run(Gossip(60, period=0.5).run(node))
    assert 0 < fake.sent_at[0] < 0.5
    np.testing.assert_allclose(np.diff(fake.sent_at), 0.5)
    assert {to for to, _ in fake.sent} == set(range(1, 9))


def test_default_period_is_twice_the_time_for_a_model() -> None:
    for variant, seconds in (("mu", 2.0), ("um", 4.0), ("rw", 2.0)):  # training takes a second
        fake = FakeRuntime()
        fake.run(Gossip(5, variant).run(fake.node(nodes=3, params=np.zeros(2, np.float32))))  # type: ignore[arg-type]
        np.testing.assert_allclose(np.diff(fake.sent_at), seconds)


def test_devices_that_take_no_time_still_receive_models(tmp_path: Path) -> None:
    described = experiment(Gossip(60), "full", partition={"name": "iid"}, speed={"step_seconds": 0.0})
    run = described.run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["accuracy"]["mean"] > 0.7
    assert run.summary["time"]["virtual_s"] > 0.05


def test_age_stays_below_the_limit() -> None:
    fake, node = after_receiving("mu", model(1, 8.0, age=MAX_AGE - 1))
    assert last_sent(fake)[1] == MAX_AGE - 1
    _, other = after_receiving("mu", model(1, 8.0, age=last_sent(fake)[1]))
    assert (node.rejected_count, other.rejected_count) == (0, 0)


def test_failed_peers_are_not_sent_models() -> None:
    fake = FakeRuntime().mark_failed(1, at=5.0).mark_failed(2, at=11.0)
    node = fake.node(nodes=3, params=np.zeros(2, np.float32), topology=Ring())
    fake.run(Gossip(40, period=0.5).run(node))
    late = {to for (to, _), at in zip(fake.sent, fake.sent_at, strict=True) if at > 5.0}
    assert late == {2}
    assert max(fake.sent_at) < 11.0
    assert node.now() > 19.0


# Complete runs


@pytest.mark.parametrize(
    ("variant", "merge"), [("mu", "age"), ("mu", "average"), ("um", "age"), ("um", "average"), ("rw", "age")]
)
def test_nodes_learn_and_a_run_is_reproducible(variant: Any, merge: Any, tmp_path: Path) -> None:
    described = experiment(Gossip(60, variant, merge=merge), "full", partition={"name": "iid"})
    runs = [described.run(tmp_path) for _ in range(2)]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    assert runs[0].summary["status"] == "completed"
    assert runs[0].summary["messages_sent"] == 8 * 60
    assert runs[0].summary["accuracy"]["mean"] > 0.7


def test_processes_learn_on_a_real_clock(tmp_path: Path) -> None:
    described = experiment(Gossip(60), "full", nodes=4, engine="processes", partition={"name": "iid"})
    run = described.run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["messages_sent"] == 4 * 60
    before = Setup(described).evaluate(Setup(described).initial)
    assert run.summary["loss"]["mean"] < 0.75 * before["loss"]


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(Gossip(60), "full", partition={"name": "iid"}), tmp_path)


def test_others_continue_if_a_node_hangs(tmp_path: Path) -> None:
    described = experiment(Gossip(10), "full")
    run = dataclasses.replace(described, fault=Faults().hang(3, round=2).schedule).run(tmp_path)
    assert run.summary["status"] == "incomplete"
    assert run.summary["lost"] == {"3": "hung: it waits for something that never arrives"}


@pytest.mark.parametrize(
    "parameters", [{"period": 0.0}, {"period": -1.0}, {"variant": "mud"}, {"merge": "mean"}, {"rounds": 0}]
)
def test_invalid_options_are_rejected_before_the_run_starts(parameters: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError, match=f"algorithm.{next(iter(parameters))} = "):
        experiment({"name": "gossip", **parameters})
