"""Small Kollaps files, and the networks that are built from them."""

from __future__ import annotations

SERVICES = '<service name="client" replicas="2"/><service name="server" replicas="2"/>'
BRIDGES = '<bridge name="left"/><bridge name="right"/>'
LINKS = """
<link origin="client" dest="left" latency="5" jitter="3" drop="0.1" upload="50Mbps" download="100Mbps"/>
<link origin="left" dest="right" latency="10" jitter="4" drop="0.2" upload="20Mbps" download="30Mbps"/>
<link origin="right" dest="server" latency="1" upload="1Gbps" download="500Kbps"/>
"""


def text(services: str = SERVICES, bridges: str = BRIDGES, links: str = LINKS, dynamic: str = "") -> str:
    return (
        f'<experiment boot="kollaps:2.0">\n<services>{services}</services>\n<bridges>{bridges}</bridges>\n'
        f"<links>{links}</links>\n<dynamic>{dynamic}</dynamic>\n</experiment>\n"
    )


SCHEDULE = '<schedule name="client" time="1" action="leave"/>'
