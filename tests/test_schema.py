"""Conversion of plain data to typed objects: accepted values, rejected values and their error texts."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import schema
from shoal.errors import TopologyError
from shoal.types import Bounds, FormerOption

if TYPE_CHECKING:
    from nowhere import Thing  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, Bounds(at_least=1)] = 1


@dataclass(frozen=True)
class Outer:
    rate: Annotated[float, Bounds(above=0, below=1)]
    name: str = "x"
    mode: Literal["fast", "slow"] = "fast"
    on: bool = False
    limit: int | None = None
    pair: tuple[int, float] = (1, 2.0)
    sizes: tuple[int, ...] = ()
    inner: Inner = field(default_factory=Inner)
    free: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Renamed:
    mode: Annotated[Literal["fast", "slow"], FormerOption("speed", (("quick", "fast"),))] = "slow"


@dataclass(frozen=True)
class RenamedAndRequired:
    rate: Annotated[int, FormerOption("speed")]


def problems_of(table: object, cls: type = Outer) -> list[str]:
    problems: list[str] = []
    assert schema.build(cls, table, "place", problems) is schema.INVALID
    return problems


def test_values_are_converted_to_their_annotations() -> None:
    table = {"rate": 0.5, "limit": 3, "pair": [1, 2], "sizes": [4, 5], "inner": {"size": 2}, "free": {"a": 1}}
    problems: list[str] = []
    built = schema.build(Outer, table, "place", problems)
    assert problems == []
    assert built == Outer(0.5, limit=3, pair=(1, 2.0), sizes=(4, 5), inner=Inner(2), free={"a": 1})
    assert isinstance(built.pair[1], float)


@pytest.mark.parametrize(
    ("table", "mode"),
    [
        ({"speed": "quick"}, "fast"),
        ({"speed": "slow"}, "slow"),
        ({"speed": "quick", "mode": "slow"}, "slow"),
        ({"mode": "slow", "speed": "quick"}, "fast"),
    ],
)
def test_a_former_name_is_accepted_with_a_warning_and_the_later_key_counts(table: dict[str, str], mode: str) -> None:
    with pytest.warns(FutureWarning, match=r"place\.speed = .*: this key has a new name; write mode = "):
        assert schema.build(Renamed, table, "place", []) == Renamed(mode)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_required_parameter_may_have_its_former_name() -> None:
    problems: list[str] = []
    assert schema.build(RenamedAndRequired, {"speed": 3}, "place", problems) == RenamedAndRequired(3)
    assert problems == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_former_value_needs_the_former_name() -> None:
    assert problems_of({"mode": "quick"}, Renamed) == ["place.mode = 'quick': expected one of 'fast', 'slow'"]
    assert problems_of({"speed": "qick"}, Renamed) == ["place.mode = 'qick': expected one of 'fast', 'slow'"]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({}, "place.rate: missing; expected number above 0 and below 1"),
        ({"rate": 0}, "place.rate = 0: expected number above 0 and below 1"),
        ({"rate": "x"}, "place.rate = 'x': expected number above 0 and below 1"),
        ({"rate": True}, "place.rate = True: expected number above 0 and below 1"),
        ({"rate": float("nan")}, "place.rate = nan: expected number above 0 and below 1"),
        ({"rate": 0.5, "nmae": "y"}, "place.nmae: unknown key; did you mean 'name'?"),
        ({"rate": 0.5, "name": 3}, "place.name = 3: expected string"),
        ({"rate": 0.5, "mode": "fats"}, "place.mode = 'fats': expected one of 'fast', 'slow'; did you mean 'fast'?"),
        ({"rate": 0.5, "on": 1}, "place.on = 1: expected true or false"),
        ({"rate": 0.5, "limit": 1.5}, "place.limit = 1.5: expected integer"),
        ({"rate": 0.5, "pair": [1]}, "place.pair = [1]: expected [integer, number]"),
        ({"rate": 0.5, "sizes": [1, "b"]}, "place.sizes[1] = 'b': expected integer"),
        ({"rate": 0.5, "sizes": 4}, "place.sizes = 4: expected a list of integer"),
        ({"rate": 0.5, "inner": {"size": 0}}, "place.inner.size = 0: expected integer at least 1"),
        ({"rate": 0.5, "inner": 4}, "place.inner = 4: expected a table"),
        ({"rate": 0.5, "free": {"a": "b"}}, "place.free.a = 'b': expected integer"),
        (7, "place = 7: expected a table"),
    ],
)
def test_a_wrong_value_is_rejected_with_its_location_and_the_expected_type(table: object, problem: str) -> None:
    assert problems_of(table) == [problem]


@dataclass(frozen=True)
class Choices:
    bits: Literal[1, 32] = 32
    mode: Literal["auto", 2] = "auto"


@pytest.mark.parametrize("value", [32.0, 1.0, True, "32", None])
def test_a_choice_of_another_type_is_rejected(value: object) -> None:
    """32.0 and True equal 32 and 1 in Python."""
    assert problems_of({"bits": value}, Choices) == [f"place.bits = {value!r}: expected one of 1, 32"]
    assert schema.build(Choices, {"bits": 1, "mode": 2}, "place", []) == Choices(1, 2)


def test_every_problem_is_found_at_once() -> None:
    found = problems_of({"rate": 2, "nmae": "y", "inner": {"size": 0, "siez": 1}, "sizes": ["a", "b"]})
    assert [p.split(" ")[0].rstrip(":") for p in found] == [
        "place.rate", "place.nmae", "place.inner.size", "place.inner.siez", "place.sizes[0]", "place.sizes[1]",
    ]  # fmt: skip


def test_any_exception_of_a_constructor_is_a_problem() -> None:
    @dataclass(frozen=True)
    class Fussy:
        error: Any

        def __post_init__(self) -> None:
            raise self.error

    assert problems_of({"error": ValueError("no")}, Fussy) == ["place: no"]
    assert problems_of({"error": TopologyError("no graph")}, Fussy) == ["place: no graph"]
    assert problems_of({"error": KeyError("k")}, Fussy) == ["place: KeyError: 'k'"]


def test_a_plain_class_has_the_parameters_of_its_constructor() -> None:
    class Plain:
        def __init__(self, alpha: Annotated[float, Bounds(at_least=0)] = 0.5, beta=3, *rest: int, **more: int) -> None:  # type: ignore[no-untyped-def]
            pass

    assert [str(p) for p in schema.parameters(Plain).values()] == [
        "alpha: number at least 0 = 0.5",
        "beta: any value = 3",
    ]


def test_a_class_without_a_constructor_takes_nothing() -> None:
    class Empty:
        pass

    assert schema.parameters(Empty) == {}
    assert problems_of({"z": 1}, Empty) == ["place.z: unknown key; nothing is expected here"]


def test_a_parameter_that_only_the_constructor_sees_is_a_parameter() -> None:
    @dataclass
    class WithInitVar:
        start: InitVar[int] = 3

    WithInitVar.__annotations__["start"] = InitVar[int]  # as in a module without postponed annotations
    assert problems_of({"start": "x"}, WithInitVar) == ["place.start = 'x': expected integer"]


@dataclass
class Postponed:
    thing: Thing = None


@dataclass
class Calls:
    function: Any = None


def test_an_annotation_that_cannot_be_resolved_is_a_problem() -> None:
    (problem,) = problems_of({}, Postponed)
    assert "Postponed cannot be resolved: name 'Thing' is not defined; import their names" in problem


def test_a_type_that_no_experiment_can_contain_is_a_problem() -> None:
    import collections.abc

    Calls.__annotations__["function"] = collections.abc.Callable[[int], int]
    (problem,) = problems_of({"function": 1}, Calls)
    assert problem.startswith("place.function: a parameter of type")


@given(st.integers(), st.integers(), st.integers())
def test_bounds_allow_values_within_them(low: int, high: int, value: int) -> None:
    assert Bounds(at_least=low, at_most=high).allows(value) == (low <= value <= high)
    assert Bounds(above=low, below=high).allows(value) == (low < value < high)


@given(st.text(max_size=8), st.sets(st.text(min_size=1, max_size=8), max_size=5))
def test_the_advice_for_an_unknown_name_lists_only_known_names(word: str, known: set[str]) -> None:
    hint = schema.nearest(word, known)
    assert (not known and hint == "; nothing is expected here") or any(name in hint for name in known)


def test_a_parameter_with_a_python_keyword_as_its_name_has_no_underscore() -> None:
    @dataclass(frozen=True)
    class Ends:
        from_: int
        to: int = 0

    problems: list[str] = []
    assert schema.build(Ends, {"from": 1, "to": 2}, "place", problems) == Ends(1, 2)
    assert problems == []
    assert problems_of({"from": "x"}, Ends) == ["place.from = 'x': expected integer"]
    assert problems_of({"from_": 1}, Ends) == [
        "place.from_: unknown key; did you mean 'from'?",
        "place.from: missing; expected integer",
    ]
