"""The cost of sealed links: CURVE compared with plain links.

    python benchmarks/sealed.py            # about four minutes
    python benchmarks/sealed.py --short    # one

Messages have the size of GN-LeNet (359,336 bytes). Links: one process sends to another at full speed, with the engine's
own transport, over 1 Gbit/s shaped by the kernel (as root), and over the loopback, which only copies. Runs: 16 nodes,
GN-LeNet, 5-regular, in rounds per second, with 8 local steps, with 2 as in the example, and with 1. Each pair is
measured in turns, so a busy machine slows both. The figures are the medians of the ratios.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np
import zmq

from measuring import Figure, median, shoal_run, show, step
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.namespaces import Namespaces, address, enter
from shoal.engines.processes.sealing import Seal
from shoal.engines.processes.transport import Transport, TransportSettings
from shoal.environment.network.access import AccessLink
from shoal.errors import LaunchError
from shoal.message import RUN_LENGTH, Message, Payload

EXAMPLE = "thousand-processes.toml"
QUIET = {"evaluation.nodes": 0, "evaluation.average": False, "dataset.samples": 2048, "nodes": 16}
PARAMETERS = 89_834
MESSAGES = 600
AHEAD = 20
"""The maximum number of messages in transit."""
GIGABIT = 125e6
"""Bytes per second."""

guards: set[asyncio.Task[None]] = set()


async def _transport(id: int, pairs: list[KeyPair], place: str | None, deliver: Any) -> Transport:
    """Open the transport of node `id`, in a network namespace if there is one."""
    if place is not None:
        enter(place)  # ZeroMQ's threads start later, in the same namespace
    context: zmq.Context[Any] = zmq.Context()
    seal = Seal(context, pairs[id], print, time.monotonic) if pairs else None
    settings = TransportSettings(
        run="0" * RUN_LENGTH,
        host="127.0.0.1" if place is None else address(id),
        max_message_bytes=2**24,
        connections=8,
        send_timeout=60.0,
    )
    transport = Transport(context, id, settings, deliver=deliver, reject=print, seal=seal)
    if seal is not None:
        for node, pair in enumerate(pairs):
            seal.allow(str(node), pair.public)
        guards.add(asyncio.create_task(seal.serve()))
    return transport


def _receive(pipe: Connection, pairs: list[KeyPair], place: str | None) -> None:
    """Node 1: report the time of the messages after the first one, and the processor time."""

    async def run() -> None:
        done = asyncio.Event()
        times: list[float] = []
        began = 0.0

        def deliver(message: Message) -> None:
            nonlocal began
            times.append(time.perf_counter())
            if len(times) == 1:
                began = time.process_time()
            if len(times) % AHEAD == 0:
                pipe.send(len(times))
            if len(times) > MESSAGES:
                done.set()

        transport = await _transport(1, pairs, place, deliver)
        pipe.send(transport.endpoint)
        transport.start([pipe.recv(), transport.endpoint])
        await done.wait()
        pipe.send((times[-1] - times[0], time.process_time() - began))

    asyncio.run(run())


def _send(pipe: Connection, result: Connection, pairs: list[KeyPair], place: str | None) -> None:
    """Node 0: report the seconds of all messages, and the processor seconds of sender and receiver."""

    async def run() -> tuple[float, float, float]:
        transport = await _transport(0, pairs, place, print)
        other = pipe.recv()
        pipe.send(transport.endpoint)
        transport.start([transport.endpoint, other])
        values = np.random.default_rng(1).standard_normal(PARAMETERS).astype(np.float32)
        began, there = time.process_time(), 0
        for round in range(MESSAGES + 1):
            message = Message(0, "model", round, Payload({"params": values}).frozen())
            await transport.send(1, message)
            while round - there >= 2 * AHEAD:
                there = await asyncio.to_thread(pipe.recv)
        while isinstance(report := await asyncio.to_thread(pipe.recv), int):
            pass
        seconds, received = report
        return seconds, time.process_time() - began, received

    result.send(asyncio.run(run()))


def link(sealed: bool, places: Sequence[str | None] = (None, None)) -> tuple[float, float]:
    """Measure bytes per second from one process to another, and processor seconds per message on both sides."""
    pairs = [KeyPair.fresh() for _ in range(2)] if sealed else []
    (sender_end, receiver_end), (result, result_end) = multiprocessing.Pipe(), multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork").Process
    sender = fork(target=_send, args=(sender_end, result_end, pairs, places[0]))
    receiver = fork(target=_receive, args=(receiver_end, pairs, places[1]))
    for end in (sender, receiver):
        end.start()
    seconds, sending, receiving = result.recv()
    for end in (sender, receiver):
        end.join()
    size = Message(0, "model", 0, Payload({"params": np.zeros(PARAMETERS, np.float32)})).wire_size
    return MESSAGES * size / seconds, (sending + receiving) / MESSAGES


def links(repeats: int) -> list[Figure]:
    where, bare = "over the loopback", _side_by_side(repeats, [None, None])
    figures = _link_figures("one link of 1 Gbit/s", "over a veth", _over_a_gigabit(max(3, repeats // 2)))
    figures += _link_figures("one link that only copies", where, bare)
    cost = 1e3 * median([sealed - plain for (_, plain), (_, sealed) in bare])
    note = "more per message, sender and receiver together"
    return [*figures, Figure("… processor time", cost, "ms", note=note)]


Measured: TypeAlias = list[tuple[tuple[float, float], tuple[float, float]]]
"""Results of `link` for a plain link and a sealed link, in turns."""


def _side_by_side(repeats: int, places: Sequence[str | None]) -> Measured:
    return [(link(False, places), link(True, places)) for _ in range(repeats)]


def _over_a_gigabit(repeats: int) -> Measured:
    try:
        namespaces = Namespaces([AccessLink(GIGABIT, GIGABIT)] * 2)
    except LaunchError as error:
        print(f"no link of 1 Gbit/s: {error}")
        return []
    try:
        return _side_by_side(repeats, [namespaces.place(0), namespaces.place(1)])
    finally:
        namespaces.close()


def _link_figures(what: str, where: str, measured: Measured) -> list[Figure]:
    if not measured:
        return []
    plain, sealed = (median([each[side][0] for each in measured]) / 1e6 for side in (0, 1))
    ratio = median([sealed / plain for (plain, _), (sealed, _) in measured])
    note = f"bytes per second {where}: {sealed:.0f} and {plain:.0f} MB/s"
    return [Figure(f"{what}, sealed / plain", ratio, "×", at_least=0.85, note=note)]


def runs(repeats: int, rounds: int, local_steps: int) -> list[Figure]:
    ratios, shares, processor, memory = [], [], [], []
    for _ in range(repeats):
        settings = {**QUIET, "algorithm.rounds": rounds, "training.local_steps": local_steps}
        plain = shoal_run(EXAMPLE, settings)
        sealed = shoal_run(EXAMPLE, {**settings, "processes.sealed": True})
        assert plain["digest"] == sealed["digest"]
        before, after = plain["time"], sealed["time"]
        ratios.append(before["wall_s"] / after["wall_s"])
        shares.append(before["total_cpu_s"] / after["total_cpu_s"])
        processor.append((after["total_cpu_s"] - before["total_cpu_s"]) / (16 * rounds))
        memory.append(sealed["memory"]["uss_mean_mib"] - plain["memory"]["uss_mean_mib"])
    what = f"16 nodes, local steps: {local_steps}"
    return [
        Figure(f"{what}, sealed / plain", median(ratios), "×", at_least=0.85, note="rounds per second"),
        Figure("… by processor time", median(shares), "×", at_least=0.85, note="rounds per second of a core"),
        Figure("… processor time", 1e3 * median(processor), "ms", note="more per node and round, degree 5"),
        Figure("… memory", median(memory), "MiB", note="more private memory per node"),
    ]


def main(short: bool) -> None:
    figures: list[Figure] = []
    with step("links"):
        figures += links(repeats=3 if short else 7)
    for local_steps, rounds in ((2, 30),) if short else ((8, 15), (2, 40), (1, 60)):
        with step(f"runs with {local_steps} local steps"):
            figures += runs(1 if short else 3, rounds, local_steps)
    show("Sealed links, GN-LeNet", figures)


if __name__ == "__main__":
    started = time.monotonic()
    main("--short" in sys.argv)
    print(f"{time.monotonic() - started:.0f} s in total")
