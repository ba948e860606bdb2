"""Read and write the network descriptions of Kollaps (Gouveia et al., EuroSys 2020).

    <experiment boot="kollaps:2.0">
      <services> <service name="client" image="…" replicas="3"/> … </services>
      <bridges>  <bridge name="switch"/> … </bridges>
      <links>    <link origin="client" dest="switch" latency="5" upload="50Mbps" download="1Gbps"/> … </links>
      <dynamic>  <schedule name="client" time="30" action="leave" amount="2"/> … </dynamic>
    </experiment>

Units are those of the files, so that a written description reads back unchanged: milliseconds for latency and jitter,
Mbit/s for bandwidth, seconds for time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, cast, get_args
from xml.parsers import expat

from shoal.schema import nearest

Action: TypeAlias = Literal["join", "leave", "crash", "disconnect", "reconnect"]


@dataclass(frozen=True)
class Service:
    """A service; nodes are its replicas."""

    name: str
    replicas: int = 1
    """The number of replicas. A service with a scheduled join starts with none instead."""
    share: bool = False
    """Whether all replicas share each link of the service. Otherwise every replica has its own."""
    reuse: bool = True
    """Whether a replica that left may join again."""
    supervisor: bool = False
    """Whether the service monitors the others and is not part of the network."""
    image: str = ""
    command: str = ""


@dataclass(frozen=True)
class Link:
    """A link from `origin` to `dest` with bandwidth `upload`, and back with `download`. None: one-way."""

    origin: str
    dest: str
    latency: float
    upload: float
    download: float | None = None
    jitter: float = 0.0
    drop: float = 0.0
    network: str = ""


@dataclass(frozen=True)
class ServiceEvent:
    """A change of a bridge or of some replicas of a service: they join, leave, crash, disconnect or reconnect."""

    time: float
    name: str
    action: Action
    amount: int = 1
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class LinkEvent:
    """A link that joins, leaves or changes. None: unchanged.

    Properties apply from `origin` to `dest`. If `download` is given, they apply to the reverse direction as well.
    """

    time: float
    origin: str
    dest: str
    action: Action | None = None
    latency: float | None = None
    upload: float | None = None
    download: float | None = None
    jitter: float | None = None
    drop: float | None = None
    line: int = field(default=0, compare=False)

    @property
    def is_new(self) -> bool:
        """Whether the event has every property that a new link needs."""
        return self.action == "join" and self.latency is not None and self.upload is not None


@dataclass(frozen=True)
class Description:
    """The content of a file."""

    services: tuple[Service, ...]
    bridges: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    schedule: tuple[ServiceEvent | LinkEvent, ...] = ()
    """In the order of the file."""
    boot: str = ""


ITEMS = {"services": "service", "bridges": "bridge", "links": "link", "dynamic": "schedule"}
PROPERTIES = ("latency", "upload", "download", "jitter", "drop")
ATTRIBUTES = {
    "experiment": {"boot"},
    **{section: set[str]() for section in ITEMS},
    "service": {"name", "replicas", "share", "reuse", "supervisor", "image", "command"},
    "bridge": {"name"},
    "link": {"origin", "dest", "network", *PROPERTIES},
    "schedule": {"time", "name", "action", "amount", "origin", "dest", "network", *PROPERTIES},
}
IGNORED = {
    "port", "controllername", "controller_ip", "machinename", "ip", "kollaps_folder", "topology_file", "script",
}  # fmt: skip
"""Attributes of services that only Kollaps uses: how to start them."""

MAX_REPLICAS = 1_000_000
"""Replicas of all services, including replicas that join later."""
_MEGABITS = {"Gbps": (1000, 1), "Mbps": (1, 1), "Kbps": (1, 1000)}
"""Units in Mbit/s, as a numerator and a denominator."""


def read(path: Path) -> Description:
    """Read a file. Raises ValueError, with the file and the line, if it is invalid by itself."""
    return _Reader(path).description()


def write(description: Description, path: Path) -> None:
    """Write a file that Kollaps accepts and that `read` reads as the same description."""
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', _tag("experiment", {"boot": description.boot}, "")]
    sections: dict[str, list[Mapping[str, Any]]] = {
        "services": [vars(service) for service in description.services],
        "bridges": [{"name": name} for name in description.bridges],
        "links": [vars(link) for link in description.links],
        "dynamic": [{k: v for k, v in vars(event).items() if k != "line"} for event in description.schedule],
    }
    for section, items in sections.items():
        if items:
            tags = (f"    {_tag(ITEMS[section], item, '/')}" for item in items)
            lines += [f"  <{section}>", *tags, f"  </{section}>"]
    path.write_text("\n".join([*lines, "</experiment>", ""]), encoding="utf-8")


def _tag(name: str, attributes: Mapping[str, Any], end: str) -> str:
    from xml.sax.saxutils import quoteattr  # imports urllib, which is slow, and only writing files needs it

    given = {key: value for key, value in attributes.items() if value is not None and value != ""}
    return (
        " ".join([f"<{name}", *(f"{key}={quoteattr(_format(key, value))}" for key, value in given.items())]) + f"{end}>"
    )


def _format(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if key not in ("upload", "download"):
        return str(value)
    for unit, (numerator, denominator) in _MEGABITS.items():  # Kollaps reads only integers
        if (count := value * denominator / numerator).is_integer() and count * numerator / denominator == value:
            return f"{int(count)}{unit}"
    return f"{value!r}Mbps"


@dataclass(frozen=True)
class _Element:
    tag: str
    attributes: Mapping[str, str]
    line: int


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.depth: list[str] = []
        self.found: dict[str, list[_Element]] = {"experiment": []}

    def description(self) -> Description:
        self._parse()
        if not self.found["experiment"]:
            self._reject("expected an <experiment> element")
        root = self.found["experiment"][0]
        services = tuple(self._service(e) for e in self.found.get("services", []))
        bridges = tuple(self._text(e, "name") for e in self.found.get("bridges", []))
        if not services:
            self._reject("no services; nodes are the replicas of services, so add one", root)
        self._limit_replicas()
        names: set[str] = set()
        for element in (*self.found.get("services", []), *self.found.get("bridges", [])):
            if (name := self._text(element, "name")) in names:
                self._reject(
                    f"the name {name!r} is used twice; every service and every bridge needs its own name", element
                )
            names.add(name)
        links = tuple(self._link(e, names) for e in self.found.get("links", []))
        events = tuple(self._event(e, set(bridges), names) for e in self.found.get("dynamic", []))
        self._check_links(links, events)
        return Description(services, bridges, links, events, root.attributes.get("boot", ""))

    def _limit_replicas(self) -> None:
        """Limit the number of replicas: all of them and their links are held in memory."""
        total = 0
        joining = [e for e in self.found.get("dynamic", []) if e.attributes.get("action") == "join"]
        counted = [(e, "replicas") for e in self.found.get("services", [])] + [(e, "amount") for e in joining]
        for element, key in counted:
            total += self._count(element, key)
            if total > MAX_REPLICAS:
                self._reject(
                    f"{key} = {element.attributes[key]!r}: more than {MAX_REPLICAS:,} replicas in total; use fewer",
                    element,
                )

    # Parsing

    def _parse(self) -> None:
        parser = expat.ParserCreate()
        parser.StartElementHandler = lambda tag, attributes: self._begin(
            _Element(tag, attributes, parser.CurrentLineNumber)
        )
        parser.EndElementHandler = lambda tag: self.depth.pop()
        # Entities need a document type. Without one, nothing is expanded and no other file is included.
        parser.StartDoctypeDeclHandler = lambda *_: self._reject(
            "it declares a document type, which Kollaps files do not need; remove <!DOCTYPE …>",
            _Element("", {}, parser.CurrentLineNumber),
        )
        try:
            parser.Parse(self.path.read_bytes(), True)
        except OSError as error:
            self._reject(f"cannot read this file: {error.strerror}")
        except expat.ExpatError as error:
            self._reject(f"not valid XML: {expat.ErrorString(error.code)}", _Element("", {}, error.lineno))
        except LookupError as error:
            self._reject(f"not valid XML: {error}")

    def _begin(self, element: _Element) -> None:
        place, tag = tuple(self.depth), element.tag
        expected: Collection[str]
        if not place:
            expected = ["experiment"]
        elif place == ("experiment",):
            expected = ITEMS
        else:
            expected = [ITEMS[place[1]]] if len(place) == 2 else []
        if tag not in expected:
            where = f"in <{place[-1]}>" if place else "at the top"
            self._reject(f"<{tag}> {where}{nearest(tag, expected)}", element)
        known = ATTRIBUTES[tag]
        for key in element.attributes:
            if key not in known and not (tag == "service" and key in IGNORED):
                self._reject(f"<{tag}> has no attribute {key!r}{nearest(key, known)}", element)
        if len(place) == 1:
            if tag in self.found:
                self._reject(f"a second <{tag}>; merge it into the first", element)
            self.found[tag] = []
        else:
            self.found[place[1] if place else tag].append(element)
        self.depth.append(tag)

    # Elements

    def _service(self, element: _Element) -> Service:
        given = element.attributes
        return Service(
            self._text(element, "name"),
            replicas=self._count(element, "replicas"),
            share=self._flag(element, "share", False),
            reuse=self._flag(element, "reuse", True),
            supervisor=self._flag(element, "supervisor", False),
            image=given.get("image", ""),
            command=given.get("command", ""),
        )

    def _link(self, element: _Element, names: Collection[str]) -> Link:
        origin, dest = self._ends(element, names)
        properties = self._properties(element)
        for key in ("latency", "upload"):
            if key not in properties:
                self._reject(f"<link> from {origin!r} to {dest!r} has no {key}", element)
        return Link(origin, dest, **properties, network=element.attributes.get("network", ""))

    def _event(self, element: _Element, bridges: Collection[str], names: Collection[str]) -> ServiceEvent | LinkEvent:
        given = element.attributes
        time = self._number(element, "time", "a time in seconds, at least 0")
        action = None
        if "action" in given:
            if given["action"] not in get_args(Action):
                self._reject(
                    f"action = {given['action']!r}: unknown{nearest(given['action'], get_args(Action))}", element
                )
            action = cast(Action, given["action"])
        if "name" in given:
            return self._service_event(element, time, action, bridges, names)
        if not {"origin", "dest"} & given.keys():
            self._reject("<schedule> has no target; expected a name, or an origin and a dest", element)
        return self._link_event(element, time, action, names)

    def _service_event(
        self, element: _Element, time: float, action: Action | None, bridges: Collection[str], names: Collection[str]
    ) -> ServiceEvent:
        name = self._known(element, "name", names)
        for key in ("origin", "dest", *PROPERTIES):
            if key in element.attributes:
                self._reject(
                    f"<schedule> of {name!r} has no {key}; to change a link, give origin and dest instead of name",
                    element,
                )
        if action is None:
            self._reject(f"<schedule> of {name!r} has no action{nearest('', get_args(Action))}", element)
        amount = self._count(element, "amount")
        if name in bridges and (action not in ("join", "leave") or amount > 1):
            self._reject(f"{name!r} is a bridge: it can only join or leave, with amount = 1", element)
        return ServiceEvent(time, name, action, amount, element.line)

    def _link_event(self, element: _Element, time: float, action: Action | None, names: Collection[str]) -> LinkEvent:
        origin, dest = self._ends(element, names)
        properties = self._properties(element)
        if "amount" in element.attributes:
            self._reject("<schedule> of a link has no amount", element)
        if action == "crash":
            self._reject("a link cannot crash; expected leave, disconnect, join or reconnect", element)
        if action is None and not properties:
            self._reject("<schedule> of a link has neither an action nor a property", element)
        return LinkEvent(time, origin, dest, action, **properties, line=element.line)

    def _check_links(self, links: Sequence[Link], events: Sequence[ServiceEvent | LinkEvent]) -> None:
        """Check that every scheduled change of a link names a link that exists at some time."""
        scheduled = [event for event in events if isinstance(event, LinkEvent)]
        pairs: set[tuple[str, str]] = set()
        created: list[Link | LinkEvent] = [*links, *(event for event in scheduled if event.is_new)]
        for link in created:
            pairs |= {(link.origin, link.dest)} | ({(link.dest, link.origin)} if link.download is not None else set())
        for event in scheduled:
            forward, reverse = (event.origin, event.dest), (event.dest, event.origin)
            if event.action is None:
                required = [forward] if event.download is None else [forward, reverse]
            else:
                required = [forward] if forward in pairs or reverse not in pairs else [reverse]
            for origin, dest in required:
                if (origin, dest) not in pairs:
                    hint = "; to add a link, give latency and upload" if event.action == "join" else ""
                    self._reject(f"there is no link from {origin!r} to {dest!r}{hint}", _Element("", {}, event.line))

    def _ends(self, element: _Element, names: Collection[str]) -> tuple[str, str]:
        origin, dest = self._known(element, "origin", names), self._known(element, "dest", names)
        if origin == dest:
            self._reject(f"<{element.tag}> from {origin!r} to itself; put a bridge between the replicas", element)
        return origin, dest

    def _known(self, element: _Element, key: str, names: Collection[str]) -> str:
        name = self._text(element, key)
        if name not in names:
            self._reject(f"{key} = {name!r}: there is no such service or bridge{nearest(name, names)}", element)
        return name

    def _properties(self, element: _Element) -> dict[str, Any]:
        given = element.attributes
        properties: dict[str, Any] = {}
        for key in PROPERTIES:
            if key not in given:
                continue
            if key in ("upload", "download"):
                properties[key] = self._bandwidth(element, key)
            elif key == "drop":
                properties[key] = self._number(element, key, "a probability from 0 to 1", 1.0)
            else:
                properties[key] = self._number(element, key, "milliseconds, at least 0")
        return properties

    def _bandwidth(self, element: _Element, key: str) -> float:
        """Return the bandwidth in Mbit/s."""
        text = element.attributes[key].strip()
        match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)", text)
        value = self._parsed(match[1]) if match else None
        problem = f"{key} = {text!r}: expected a number and a unit, such as 100Kbps, 60Mbps or 1.5Gbps"
        if match is None or value is None:
            self._reject(problem, element)
        unit = next((known for unit, known in _MEGABITS.items() if unit.lower() == match[2].lower()), None)
        if unit is None:
            self._reject(
                f"{problem}; " + (f"the unit {match[2]!r} is unknown" if match[2] else "it has no unit"), element
            )
        megabits = value * unit[0] / unit[1]
        if not megabits:
            self._reject(
                f"{key} = {text!r}: expected a bandwidth above 0; to remove a link, schedule action = 'leave'", element
            )
        if math.isinf(megabits):
            self._reject(problem, element)
        return megabits

    def _number(self, element: _Element, key: str, expected: str, at_most: float = math.inf) -> float:
        text = self._text(element, key)
        value = self._parsed(text)
        if value is None or not 0 <= value <= at_most:
            self._reject(f"{key} = {text!r}: expected {expected}", element)
        return value

    def _count(self, element: _Element, key: str) -> int:
        text = element.attributes.get(key, "1")
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text) or not int(text):
            self._reject(f"{key} = {text!r}: expected an integer, at least 1", element)
        return int(text)

    def _flag(self, element: _Element, key: str, default: bool) -> bool:
        text = element.attributes.get(key, str(default)).strip().lower()
        if text not in ("true", "false"):
            self._reject(f"{key} = {element.attributes[key]!r}: expected true or false", element)
        return text == "true"

    def _text(self, element: _Element, key: str) -> str:
        text = element.attributes.get(key, "").strip()
        if not text:
            self._reject(f"<{element.tag}> has no {key}", element)
        return text

    @staticmethod
    def _parsed(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def _reject(self, problem: str, element: _Element | None = None) -> NoReturn:
        raise ValueError(f"{self.path}:{element.line}: {problem}" if element else f"{self.path}: {problem}")
