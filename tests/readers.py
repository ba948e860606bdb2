"""All code of Shoal that reads data from the network, as readers for a `Fuzzer`.

The readers decode messages and control messages as nodes and the coordinator do, and apply reports to the network
model. Every sharing, every codec of positions and every codec of values has a reader of payloads. A payload that the
reader accepts must also be mergeable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from shoal.compression.compressors import Compressor, QuantizedCompressor, TopKCompressor
from shoal.data.dataset import Data, Samples
from shoal.data.local import NodeData
from shoal.engines.processes import control, shaper
from shoal.engines.processes.network_process import ReportsByNode, Timetable
from shoal.environment.network.links import Uniform
from shoal.environment.network.model import NetworkModel
from shoal.errors import MessageError
from shoal.experiment.registry import find, registry
from shoal.message import RUN_LENGTH, Message, Payload, address, decode, framed, ticket_of
from shoal.sharing.secure.masks import SEED_BYTES, TAG_BYTES
from shoal.sharing.secure.messages import (
    COMMITMENTS,
    INCLUDED,
    KEY_SHARES,
    OWNERS,
    PAIR_SEEDS,
    SELF_SEED,
    VALUES,
    MaskedUpdate,
    read_node_ids,
    read_rows,
    to_node_ids,
    to_rows,
)
from shoal.sharing.sharing import NodeAware, NodeInfo, PayloadChecker, Sharing, payload_for
from shoal.testing import Mutator, Reader
from shoal.testing.fuzz import Frames
from shoal.types import NodeId, Params

RUN = "r" * RUN_LENGTH
SHAPES = ((12, 8), (8,), (8, 5), (5,))
"""The tensor shapes of the test models."""
SIZE = 149
PARTNERS = 3
"""The number of peers with pairwise masks in secure aggregation."""
ME, PEER = 0, 1
NODES = 4


def readers() -> list[Reader]:
    """Create all readers."""
    return [*messages(), *control_messages(), *network_model_reports(), *sharings(), *codecs(), *secure_messages()]


# Messages.


def messages() -> Iterator[Reader]:
    samples = [_frames(payload) for payload in _payloads()]
    yield Reader("messages", _read_message, samples)
    addressed = [[address(ME, ticket), *frames] for frames in samples for ticket in (None, 7)]
    yield Reader("addresses", _read_addressed, addressed, _mutate_addressed)


def _payloads() -> Iterator[Payload]:
    yield Payload({})
    yield Payload({"params": np.arange(5, dtype=np.float32)}, {"age": 2, "name": "x", "share": 0.5, "last": True})
    yield Payload({"x": np.zeros((3, 2, 2), np.float16), "y": np.arange(3), "ok": np.ones(2, np.bool_)})
    yield Payload({f"part {number}": np.arange(number, dtype=np.uint8) for number in range(20)})


def _read_message(frames: Frames) -> Message:
    message = decode(frames, RUN)
    assert [bytes(frame) for frame in message.frames()] == frames, "what was read is not what was sent"
    assert message.wire_size == sum(map(framed, (len(address(ME)), *map(len, frames)))), "it has another length"
    return message


def _read_addressed(frames: Frames) -> None:
    if frames:
        ticket_of(frames[0], ME)
        _read_message(frames[1:])


def _mutate_addressed(mutator: Mutator, frames: Frames) -> tuple[str, Frames]:
    """Mutate the address or the frames behind it."""
    how, changed = mutator.frames(frames)
    if changed[:1] != frames[:1]:
        return how, changed
    how, changed = mutator.frames(frames[1:])
    return how, [frames[0], *changed]


# Control messages between the coordinator, the network process and nodes.


def control_messages() -> Iterator[Reader]:
    to_node = (
        control.Start(["tcp://127.0.0.1:1"] * 3, 1.5, None, [1], False), control.PeerFailed(1, 2.0),
        control.PeerRestarted(1, "tcp://127.0.0.1:2"), control.SetOnline(True), control.InjectFault("slow", "why", 2.0),
        control.Finish(True, 3, 1.0), control.LastMessageRead(),
    )  # fmt: skip
    from_node = (
        control.NodeListening(0, RUN, "tcp://127.0.0.1:1"), control.NetworkListening(RUN, "tcp://127.0.0.1:1"),
        control.FirstRoundStarted(0), control.ProgressReport(0, 3, 1000, 2), control.Heartbeat(0, True),
        control.ModelSnapshot(0, 1, 2.0), control.NodeDone(0), control.NodeFailed(0, RUN, "why"),
        control.NodeExiting(0),
    )  # fmt: skip
    posts = (shaper.Registration(1.0), shaper.Submission(1, 2, 100, 1.0, True))
    for name, read, controls in (
        ("control, to a node", control.decode_to_node, to_node),
        ("control, from a node", control.decode_from_node, from_node),
        ("posts, to the network", shaper.decode_node_report, posts),
    ):
        samples = [[control.encode(each)] for each in controls]
        yield Reader(name, partial(_read_one, read), samples, _mutate_one, control.DECODE_ERRORS)


def network_model_reports() -> Iterator[Reader]:
    """Reports of an untrusted node to the network process, and their effect on messages of other nodes."""
    posts = (
        shaper.Registration(1.0),
        shaper.Submission(1, 2, 100, 1.0, True),
        shaper.Submission(2, 3, 10**6, 0.5, False),
    )
    network_state = Uniform(latency=0.01, upload=8.0, download=8.0).build(NODES, seed=0).initial_state
    network_model = NetworkModel(network_state, NODES, seed=0)
    network_model.load()  # compile now, so that the first message does not wait for it
    timetable = Timetable(network_model, iter(()))
    timetable.begin(0.0)
    samples = [[shaper.encode(post)] for post in posts]
    yield Reader("posts, to the model", partial(_post, timetable, itertools.count(1)), samples, _mutate_one)


def _post(timetable: Timetable, clock: Iterator[int], frames: Frames) -> None:
    """Advance by one second and check that the message of an honest node leaves at its usual rate."""
    now, reports = float(next(clock)), ReportsByNode()
    try:
        report = shaper.decode_node_report(frames[0])
    except control.DECODE_ERRORS as error:
        raise MessageError(str(error)) from error
    finally:
        timetable.catch_up(now, reports)
    plausible = timetable.is_plausible(report, now)
    if plausible and isinstance(report, shaper.Submission) and 0 <= report.to < NODES:
        timetable.submit(PEER, report, reports)
    timetable.catch_up(now, reports)
    reports.clear()
    timetable.submit(ME, shaper.Submission(7, NODES - 1, 10_000, now, True), reports)
    timetable.catch_up(now + 0.5, reports)
    left = reports[ME][None, 7]
    assert isinstance(left, shaper.Departure), left
    assert left.was_sent
    assert 0.01 <= round(left.time - now, 6) <= 0.02, f"it took {left.time - now} s"
    if not plausible:
        raise MessageError("the time is outside the run")


def _read_one(read: Callable[[bytes], object], frames: Frames) -> object:
    return read(frames[0])


def _mutate_one(mutator: Mutator, frames: Frames) -> tuple[str, Frames]:
    how, changed = mutator.packed(frames[0])
    return how, [changed]


# Payloads.


def sharings() -> Iterator[Reader]:
    for name in registry("sharing"):
        peers, models = (
            [_started(find("sharing", name)(), node) for node in (ME, PEER)],
            [_model(n) for n in (ME, PEER)],
        )
        if name == "secure":  # a node creates its payloads; see `secure_messages`
            samples = [_frames(_masked_update())]
        else:
            samples = [_frames(_outgoing_payload(peers[PEER], models[PEER], round), round) for round in range(3)]
            _outgoing_payload(peers[ME], models[ME], 0)
        yield Reader(
            f"sharing, {name}", partial(_check_and_merge, peers[ME], models[ME], name), samples, Mutator.payload
        )


def _outgoing_payload(sharing: Sharing, params: Params, round: int) -> Payload:
    outgoing = sharing.outgoing(params, round)
    return payload_for(outgoing, ME)


def _check_and_merge(sharing: Sharing, params: Params, name: str, frames: Frames) -> None:
    payload = decode(frames, RUN).payload
    assert isinstance(sharing, PayloadChecker), f"{name} checks nothing"
    sharing.check(payload, params)
    if name != "secure":  # it merges unmasked sums, not payloads
        merged = sharing.merge(params, {PEER: payload}, {PEER: 0.5})
        assert merged.shape == params.shape, f"a model of shape {merged.shape}, expected {params.shape}"
        assert merged.dtype == np.float32, f"a model of {merged.dtype}, expected float32"


def _started(sharing: Sharing, id: NodeId) -> Sharing:
    if isinstance(sharing, NodeAware):
        samples = Samples(np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12) % 5)
        data = NodeData(Data(samples, samples, 5), np.arange(6) + 6 * id)
        sharing.bind(NodeInfo(id, 2, 1, SHAPES, data))
    sharing.start(_model(2))
    return sharing


def _model(node: NodeId) -> Params:
    params = np.random.default_rng(node).standard_normal(SIZE, np.float32)
    params.flags.writeable = False
    return params


def codecs() -> Iterator[Reader]:
    for name in registry("indices"):
        compressor: Compressor = TopKCompressor(0.3, indices=find("indices", name)())
        yield _compressed(f"positions, {name}", compressor)
    for name in registry("values"):
        yield _compressed(f"values, {name}", QuantizedCompressor(find("values", name)()))
    yield _compressed("positions, at random", find("compressor", "random")())


def _compressed(name: str, compressor: Compressor) -> Reader:
    rng = np.random.default_rng(1)
    samples = [_frames(compressor.compress(_model(node), rng)[0]) for node in range(4)]

    def read(frames: Frames) -> None:
        part = compressor.decompress(decode(frames, RUN).payload, SIZE)
        target = np.zeros(SIZE, np.float32)
        part.add_to(target)

    return Reader(name, read, samples, Mutator.payload)


# Further messages of secure aggregation.


def secure_messages() -> Iterator[Reader]:
    seed = bytes(range(SEED_BYTES))
    cases = {
        "masked update": (_masked_update(), _read_masked_update),
        "included senders": (
            Payload({INCLUDED: to_node_ids([0, 1, 3])}),
            lambda payload: read_node_ids(payload, INCLUDED),
        ),
        "seeds": (Payload({SELF_SEED: to_rows([seed]), PAIR_SEEDS: to_rows([seed] * 2)}), _read_seeds),
        "key shares": (Payload({OWNERS: to_node_ids([1, 2]), KEY_SHARES: to_rows([bytes(80)] * 2)}), _read_key_shares),
    }
    for name, (payload, read) in cases.items():
        yield Reader(f"secure, {name}", partial(_read_payload, read), [_frames(payload)], Mutator.payload)


def _read_payload(read: Callable[[Payload], object], frames: Frames) -> object:
    return read(decode(frames, RUN).payload)


def _masked_update() -> Payload:
    secrets = 1 + PARTNERS
    values = np.random.default_rng(0).integers(2**32, size=SIZE, dtype=np.uint32)
    shares = [bytes(secrets * SEED_BYTES + TAG_BYTES)] * PARTNERS
    return MaskedUpdate(values, [bytes(SEED_BYTES)] * secrets, shares).payload()


def _read_masked_update(payload: Payload) -> None:
    _started(find("sharing", "secure")(), ME).check(payload, _model(0))  # type: ignore[attr-defined]
    if COMMITMENTS in payload.arrays:
        update = MaskedUpdate.from_payload(payload, PARTNERS)
        assert update.values is payload.arrays[VALUES]


def _read_seeds(payload: Payload) -> tuple[Sequence[bytes], Sequence[bytes]]:
    return read_rows(payload, SELF_SEED, SEED_BYTES), read_rows(payload, PAIR_SEEDS, SEED_BYTES)


def _read_key_shares(payload: Payload) -> tuple[Sequence[NodeId], Sequence[bytes]]:
    return read_node_ids(payload, OWNERS), read_rows(payload, KEY_SHARES, 80)


def _frames(payload: Payload, round: int = 0) -> Frames:
    return [bytes(frame) for frame in Message(PEER, "model", round, payload.frozen(), RUN).frames()]
