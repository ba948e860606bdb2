"""What sealed links cost: CURVE against plain, side by side.

    python benchmarks/sealed.py            # about three minutes
    python benchmarks/sealed.py --short    # one

Messages are as long as GN-LeNet (359,336 bytes). Links: one process sends to another over the loopback as fast as it
can, with the engine's own transport. Runs: 16 nodes, GN-LeNet, 5-regular, in rounds a second. Each pair is measured in
turns, so that a busy machine slows both sides, and what is shown is the median of the ratios.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from measuring import Figure, median, shoal_run, show, step
from shoal.keys import KeyPair
from shoal.message import RUN_LENGTH, Message, Payload
from shoal.processes.sealing import Seal
from shoal.processes.transport import Transport

EXAMPLE = "thousand-processes.toml"
QUIET = {"evaluation.nodes": 0, "evaluation.average": False, "dataset.samples": 2048, "nodes": 16}
PARAMETERS = 89_834
MESSAGES = 600
AHEAD = 20
"""Messages under way at most."""
GIGABIT = 125e6
"""Bytes per second."""


guards: set[asyncio.Task[None]] = set()


async def _transport(id: int, pairs: list[KeyPair], deliver: Any) -> Transport:
    context: zmq.Context[Any] = zmq.Context()
    seal = Seal(context, pairs[id], print, time.monotonic) if pairs else None
    transport = Transport(
        context,
        id=id,
        run="0" * RUN_LENGTH,
        host="127.0.0.1",
        port=None,
        max_message_bytes=2**24,
        connections=8,
        send_timeout=60.0,
        deliver=deliver,
        reject=print,
        seal=seal,
    )
    if seal is not None:
        for node, pair in enumerate(pairs):
            seal.admit(str(node), pair.public)
        guards.add(asyncio.create_task(seal.guard()))
    return transport


def _receive(pipe: Connection, pairs: list[KeyPair]) -> None:
    """Node 1: says how long the messages took after the first, and what processor time."""

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

        transport = await _transport(1, pairs, deliver)
        pipe.send(transport.endpoint)
        transport.start([pipe.recv(), transport.endpoint])
        await done.wait()
        pipe.send((times[-1] - times[0], time.process_time() - began))

    asyncio.run(run())


def _send(pipe: Connection, pairs: list[KeyPair]) -> tuple[float, float, float]:
    """Node 0: seconds for all messages, and processor seconds of the sender and of the receiver."""

    async def run() -> tuple[float, float, float]:
        transport = await _transport(0, pairs, print)
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
        while isinstance(said := await asyncio.to_thread(pipe.recv), int):
            pass
        seconds, received = said
        return seconds, time.process_time() - began, received

    return asyncio.run(run())


def link(sealed: bool) -> tuple[float, float]:
    """Bytes per second from one process to another, and processor seconds for each message, on both sides."""
    pairs = [KeyPair.fresh() for _ in range(2)] if sealed else []
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=_receive, args=(theirs, pairs))
    other.start()
    seconds, sending, receiving = _send(ours, pairs)
    other.join()
    size = Message(0, "model", 0, Payload({"params": np.zeros(PARAMETERS, np.float32)})).wire_size
    return MESSAGES * size / seconds, (sending + receiving) / MESSAGES


def links(repeats: int) -> list[Figure]:
    plain, sealed = [], []
    for _ in range(repeats):
        plain.append(link(sealed=False))
        sealed.append(link(sealed=True))
    rates = [median([rate for rate, _ in each]) for each in (plain, sealed)]
    cost = 1e3 * median([s - p for (_, s), (_, p) in zip(sealed, plain, strict=True)])
    ratio = median([s / p for (s, _), (p, _) in zip(sealed, plain, strict=True)])
    return [
        Figure("one link, sealed / plain", ratio, "×", at_least=0.85,
               note=f"bytes a second over the loopback: {rates[1] / 1e6:.0f} and {rates[0] / 1e6:.0f} MB/s"),
        Figure("… against 1 Gbit/s", rates[1] / GIGABIT, "×", note="above 1, such a link would be slower"),
        Figure("… processor time", cost, "ms", note="more, for each message, of sender and receiver together"),
    ]  # fmt: skip


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
        Figure(f"{what}, sealed / plain", median(ratios), "×", at_least=0.85, note="rounds a second"),
        Figure("… by processor time", median(shares), "×", at_least=0.85, note="rounds for each second of a core"),
        Figure("… processor time", 1e3 * median(processor), "ms", note="more, for each node and round, degree 5"),
        Figure("… memory", median(memory), "MiB", note="more, private, of a node"),
    ]


def main(short: bool) -> None:
    figures: list[Figure] = []
    with step("links"):
        figures += links(repeats=3 if short else 7)
    for local_steps, rounds in ((8, 15),) if short else ((8, 15), (1, 60)):
        with step(f"runs with {local_steps} local steps"):
            figures += runs(1 if short else 3, rounds, local_steps)
    show("Sealed links, GN-LeNet", figures)


if __name__ == "__main__":
    started = time.monotonic()
    main("--short" in sys.argv)
    print(f"{time.monotonic() - started:.0f} s in all")
