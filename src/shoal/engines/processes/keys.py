"""The key pairs of nodes, by which they know each other where links are sealed: ZeroMQ's own, CURVE on Curve25519.

    keys/
      node-0.key           the public key: whoever is to let node 0 in has this file
      node-0.key_secret    both keys: node 0's own, and nobody else may read it
      node-1.key
      …

Files are certificates as ZeroMQ's own tools write and read them. A folder's public files are the allow-list: whose key
is not among them is a stranger.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from shoal.errors import LaunchError
from shoal.types import NodeId

PUBLIC = ".key"
SECRET = ".key_secret"
KEY_BYTES = 32
ROOT = 0
"""The number of the user who may change everybody's files anyway."""
NAME = re.compile(r"node-(0|[1-9]\d*)\.key(_secret)?")


@dataclass(frozen=True)
class KeyPair:
    """A process's own keys, as ZeroMQ spells them: 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> KeyPair:
        if not zmq.has("curve"):
            raise LaunchError(
                "links cannot be sealed: this ZeroMQ was built without CURVE; install pyzmq as its publisher packs it, "
                "or set processes.sealed = false to have everything sent in the clear"
            )
        return cls(*zmq.curve_keypair())


def make_keys(folder: Path, nodes: int, force: bool = False) -> tuple[list[NodeId], list[NodeId]]:
    """Make a key pair for each of nodes 0 to nodes − 1 that has none; returns those it made, and those that it kept.

    With `force` all of them are made anew.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _nodes(folder)
    except OSError as error:
        raise LaunchError(f"keys: cannot write to the folder {str(folder)!r}: {error.strerror}") from error
    kept = [] if force else [node for node in range(nodes) if _is_there(folder, node, SECRET)]
    made = [node for node in range(nodes) if node not in kept]
    for path in [] if force else [_file(folder, node, kind) for node in range(nodes) for kind in (PUBLIC, SECRET)]:
        if path.is_symlink() and not os.path.exists(path):
            raise LaunchError(f"keys: nothing was made: {_dangling(path)}")
    foreign = [] if force else [node for node in made if node in found]
    if foreign:
        raise LaunchError(
            f"keys: {_spelt(foreign)} in {str(folder)!r} with a public key and no secret one, which may be elsewhere: "
            "nothing was made; choose another folder, or make them anew with --force"
        )
    for node in made:
        pair = KeyPair.fresh()
        _write(_file(folder, node, SECRET), pair, force)
        _write(_file(folder, node, PUBLIC), pair, force)
    for node in kept:
        if not _is_there(folder, node, PUBLIC):
            _write(_file(folder, node, PUBLIC), read_pair(folder, node), force)
    return made, kept


def read_pair(folder: Path, node: NodeId, listed: bytes | None = None) -> KeyPair:
    """A node's own keys. Raises `LaunchError` where they are missing, malformed, or not its own secret any longer; and
    where others know the node by another public key, which is `listed`."""
    path = _file(folder, node, SECRET)
    public, secret, problems = _read(path)
    problems += _too_open(path)
    if public is None or secret is None or problems:
        raise LaunchError(_complaint(folder, problems))
    if listed is not None and public != listed:
        raise LaunchError(
            f"keys: the pair in {str(path)!r} is not the one that the run began with, and nobody would let its owner "
            "in; leave the keys alone while a run lasts, and start it again"
        )
    return KeyPair(public, secret)


def read_public(folder: Path, nodes: Iterable[NodeId]) -> dict[NodeId, bytes]:
    """The allow-list: the public keys of `nodes`. Raises `LaunchError` where one is missing, or is nobody's own."""
    keys: dict[NodeId, bytes] = {}
    problems: list[str] = []
    for node in nodes:
        public, _, wrong = _read(_file(folder, node, PUBLIC))
        problems += wrong
        if public is not None:
            keys[node] = public
    problems += _shared(keys)
    if problems:
        raise LaunchError(_complaint(folder, problems))
    return keys


def list_keys(folder: Path) -> list[tuple[NodeId, str, bool]]:
    """Every node in `folder`: its public key, or what is wrong with it, and whether its secret one is here."""
    found = []
    for node in _known(folder):
        public, _, problems = _read(_file(folder, node, PUBLIC))
        shown = problems[0] if public is None else public.decode()
        found.append((node, shown, _is_there(folder, node, SECRET)))
    return found


def check_keys(folder: Path, nodes: Collection[NodeId] | None = None) -> list[str]:
    """What is wrong with the keys of `nodes`, or of all that are here; with none of it, they can seal a run."""
    problems: list[str] = []
    keys: dict[NodeId, bytes] = {}
    known = _known(folder)
    for node in known if nodes is None else sorted(nodes):
        path = _file(folder, node, PUBLIC)
        public, _, wrong = _read(path)
        problems += wrong + _too_open(path)
        if public is not None:
            keys[node] = public
        path = _file(folder, node, SECRET)
        own, _, wrong = _read(path)
        problems += wrong + _too_open(path)
        if own is not None and public is not None and own != public:
            problems.append(
                f"{str(path)!r} does not belong to {_file(folder, node, PUBLIC).name!r}: their public keys differ; "
                "copy the right one here, or make both anew with --force"
            )
    return list(dict.fromkeys(_too_open(folder) + problems)) + _shared(keys)


def require_keys(folder: Path, nodes: Collection[NodeId]) -> None:
    """Raise `LaunchError` unless these nodes' keys can seal a run."""
    problems = check_keys(folder, nodes)
    if problems:
        raise LaunchError(_complaint(folder, problems))


def _complaint(folder: Path, problems: list[str]) -> str:
    few = "".join(f"\n  - {problem}" for problem in problems[:10])
    more = f"\n  - and {len(problems) - 10} more" if len(problems) > 10 else ""
    return f"keys: links cannot be sealed with the keys in {str(folder)!r}:{few}{more}"


def _known(folder: Path) -> list[NodeId]:
    try:
        return sorted(_nodes(folder))
    except FileNotFoundError as error:
        raise LaunchError(
            f"keys: the folder {str(folder)!r} cannot be read: {error.strerror}; 'shoal keys make' makes one"
        ) from error
    except OSError as error:
        raise LaunchError(f"keys: the folder {str(folder)!r} cannot be read: {error.strerror}") from error


def _nodes(folder: Path) -> set[NodeId]:
    """Those of whom there is a key of either kind. Raises `OSError` where the folder may not be listed and entered."""
    os.stat(os.path.join(folder, "."))
    return {int(match[1]) for entry in os.listdir(folder) if (match := NAME.fullmatch(entry))}


def _file(folder: Path, node: NodeId, suffix: str) -> Path:
    return folder / f"node-{node}{suffix}"


def _is_there(folder: Path, node: NodeId, suffix: str) -> bool:
    return os.path.exists(_file(folder, node, suffix))  # unlike Path's, it raises nothing where that cannot be seen


def _write(path: Path, pair: KeyPair, force: bool) -> None:
    """As a ZeroMQ certificate. Others can never read a secret one, no half of one ever has its name, and none takes the
    place of another, unless by `force`."""
    is_secret = path.suffix == SECRET
    whose = "secret: keep it to yourself" if is_secret else "public: for all who are to let this node in"
    lines = [f"# A CURVE certificate of ZeroMQ, {whose}", "metadata", "curve"]
    lines.append(f'    public-key = "{pair.public.decode()}"')
    if is_secret:
        lines.append(f'    secret-key = "{pair.secret.decode()}"')
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_secret else 0o644)
        try:
            with os.fdopen(file, "w") as written:
                written.write("\n".join([*lines, ""]))
            if force:
                os.replace(new, path)
            else:
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"keys: cannot write {str(path)!r}: {error.strerror}") from error


def _read(path: Path) -> tuple[bytes | None, bytes | None, list[str]]:
    """The public key and the secret one, if it is a secret file; or what is wrong."""
    wants_secret = path.suffix == SECRET
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe may take for ever
            return None, None, [f"{str(path)!r} is no regular file; remove it, and copy the certificate here"]
        public, secret = zmq.auth.load_certificate(path)
    except FileNotFoundError:
        missing = f"{str(path)!r} is missing; 'shoal keys make' makes what is missing"
        return None, None, [_dangling(path) if path.is_symlink() else missing]
    except OSError as error:
        return None, None, [f"{str(path)!r} cannot be read: {error.strerror}"]
    except (ValueError, IndexError):
        return None, None, [_malformed(path, "no public key is in it")]
    if not _is_key(public):
        return None, None, [_malformed(path, "its public key is not 40 characters of Z85")]
    if not wants_secret:
        leak = f"{str(path)!r} holds a secret key, and is for others to read; make both anew with --force"
        return public, None, [] if secret is None else [leak]
    if secret is None or not _is_key(secret):
        return None, None, [_malformed(path, "no secret key of 40 characters of Z85 is in it")]
    if zmq.curve_public(secret) != public:
        return None, None, [_malformed(path, "its secret key and its public key are not a pair")]
    return public, secret, []


def _malformed(path: Path, why: str) -> str:
    return f"{str(path)!r} is no certificate of ZeroMQ: {why}; copy it here again, or make it anew with --force"


def _dangling(path: Path) -> str:
    return f"{str(path)!r} is a link to nothing; remove it, or make both anew with --force"


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


def _too_open(path: Path) -> list[str]:
    """Whether others may read a secret, or change who is let in: by a file or folder, or by that which a link leads
    to."""
    try:
        status = path.stat()
    except OSError:
        return []  # nobody reads it, which `_read` speaks of
    problems = _too_open(path.resolve().parent) if path.is_symlink() else []
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), ROOT):
        problems.append(
            f"{str(path)!r} belongs to the user with the number {status.st_uid}, who may change it, and let strangers "
            "in; chown it, or use keys of your own"
        )
    elif path.suffix == SECRET and mode & 0o077:
        problems.append(
            f"{str(path)!r} has mode {mode:04o}: others may read this secret; chmod 600 it, or make it anew"
        )
    elif mode & 0o022:
        problems.append(
            f"{str(path)!r} has mode {mode:04o}: others may write to it, and let strangers in; chmod go-w it"
        )
    return problems


def _shared(keys: dict[NodeId, bytes]) -> list[str]:
    """Nodes that nobody could tell apart."""
    owners: dict[bytes, list[NodeId]] = {}
    for node, key in keys.items():
        owners.setdefault(key, []).append(node)
    return [
        f"nodes {', '.join(map(str, nodes))} have one key: nobody could tell them apart; make each its own with --force"
        for nodes in owners.values()
        if len(nodes) > 1
    ]


def _spelt(nodes: list[NodeId]) -> str:
    names = ", ".join(map(str, nodes[:5])) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
    return f"node {names} is" if len(nodes) == 1 else f"nodes {names} are"
