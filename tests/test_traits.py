"""Traits: what a component's class declares, and the names that it must not have any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from shoal.algorithms.ipls import IPLS
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.registry import REGISTRIES, components
from shoal.node import Node
from shoal.sharing.full import FullSharing
from shoal.sharing.secure.secure import Secure
from shoal.testing import FakeRuntime
from shoal.traits import METHODS, Traits, traits_of

INTERACTIVE_METHODS = METHODS["interactive"][1]


def class_with(**attributes: Any) -> type:
    return type("Own", (), attributes)


def method(self: Any) -> None: ...


def node_with(sharing: Any) -> Node:
    return FakeRuntime().node(0, nodes=2, params=np.zeros(3, np.float32), sharing=sharing)


@pytest.mark.parametrize("kind", sorted(REGISTRIES))
def test_every_built_in_component_has_traits_that_match_its_methods(kind: str) -> None:
    for name, cls in components(kind):
        assert isinstance(traits_of(cls, kind), Traits), name


# Methods


@pytest.mark.parametrize(
    ("kind", "trait", "name"),
    [
        ("algorithm", "has_service", "serve"),
        ("topology", "has_service", "serve"),
        ("topology", "discovers_peers", "discovery"),
        ("topology", "needs_labels", "build_from"),
        *(("sharing", "interactive", name) for name in INTERACTIVE_METHODS),
    ],
)
def test_a_method_and_its_trait_come_together(kind: str, trait: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"Own has a method '{name}'; declare it with traits = Traits\({trait}=True"):
        traits_of(class_with(**{name: method}), kind)
    others = {other: method for other in METHODS[trait][1] if other != name}
    with pytest.raises(ValueError, match=rf"Own declares {trait}=True but has no method '{name}'; add the method"):
        traits_of(class_with(traits=Traits(**{trait: True}), **others), kind)
    complete = class_with(traits=Traits(**{trait: True}), **others, **{name: method})
    assert getattr(traits_of(complete, kind), trait)


def test_an_incomplete_interactive_sharing_cannot_send_its_models_unmasked() -> None:
    @dataclass
    class Incomplete(Secure):
        drain: Any = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="'drain'"):
        node_with(Incomplete())


def test_an_interactive_sharing_is_found_by_its_trait() -> None:
    assert node_with(FullSharing()).interactive_sharing is None
    secure = Secure()
    assert node_with(secure).interactive_sharing is secure


# Former names


@pytest.mark.parametrize(
    ("kind", "attributes", "replacement"),
    [
        ("algorithm", {"speaks": "server"}, "Traits(sends_to=…) or Traits(own_payloads=True)"),
        ("algorithm", {"sums": True}, "Traits(needs_only_sum=True)"),
        ("algorithm", {"per_node": frozenset({"lr"})}, "Traits(per_node_options=…)"),
        ("sharing", {"says_all": True}, "Traits(sends_whole_models=True)"),
        ("sharing", {"adds_data": True}, "Traits(adds_data=True)"),
        ("sharing", {"join": method}, "a method bind(info)"),
        (
            "sharing",
            dict.fromkeys(("prepare", "expected", "open", "attend", "part"), method),
            "Traits(interactive=True) and the methods of shoal.node.InteractiveSharing",
        ),
        ("partition", {"by_class": True}, "Traits(splits_by_class=True)"),
        ("topology", {"finder": method}, "a method discovery()"),
        ("topology", {"behind": property(method)}, "a property sampled_topology"),
        *(
            (kind, {"misfits": method}, "incompatibilities(experiment)")
            for kind in ("algorithm", "sharing", "topology")
        ),
    ],
)
def test_a_former_name_is_rejected_with_the_new_one(kind: str, attributes: dict[str, Any], replacement: str) -> None:
    with pytest.raises(ValueError, match=r"Own\..*: this name is not used any more; write ") as rejected:
        traits_of(class_with(**attributes), kind)
    assert replacement in str(rejected.value)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("dataset", {"join": True}),
        ("model", {"sums": 3, "serve": method, "build_from": method}),
        ("sharing", {"serve": method, "sums": True, "prepare": method, "open": method}),
        ("algorithm", {"per_node": 2}),
        ("partition", {"misfits": 1}),
    ],
)
def test_names_without_a_meaning_for_this_kind_are_allowed(kind: str, attributes: dict[str, Any]) -> None:
    assert traits_of(class_with(**attributes), kind) == Traits()


def test_an_option_with_a_former_name_is_allowed() -> None:
    assert IPLS().per_node == 1
    assert traits_of(IPLS, "algorithm").own_payloads


# In an experiment


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("    speaks = 'server'\n", r"Own\.speaks: this name is not used any more; write Traits\(sends_to"),
        ("    async def serve(self, node): ...\n", r"has a method 'serve'; declare it.*has_service=True"),
        ("    traits = 'server'\n", r"Own\.traits = 'server': expected an instance of shoal\.Traits"),
    ],
)
def test_a_plug_in_whose_traits_are_wrong_is_rejected(tmp_path: Any, body: str, problem: str) -> None:
    (tmp_path / "own.py").write_text(f"class Own:\n{body}    async def run(self, node): ...\n")
    with pytest.raises(ExperimentError, match=problem):
        Experiment(algorithm={"name": "own.py:Own"}, base=tmp_path)


class Declared:
    traits: ClassVar[Traits] = Traits(sends_to="anyone")


def test_the_traits_of_a_class_are_those_that_it_declares() -> None:
    assert traits_of(Declared, "algorithm").sends_to == "anyone"
