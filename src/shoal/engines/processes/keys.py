"""The key pairs that authenticate nodes where links are sealed, agents and coordinators: ZeroMQ's CURVE (Curve25519).

    keys/
      node-0.key           the public key: every process that node 0 connects to has this file
      node-0.key_secret    both keys: only node 0 may read this file
      node-1.key
      …

Files are certificates in the format of ZeroMQ's own tools. The public files of a folder are the allow-list: connections
with any other key are rejected.
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
"""The id of the user who may change all files anyway."""
NAME = re.compile(r"node-(0|[1-9]\d*)\.key(_secret)?")
MACHINE_NAME = re.compile(r"(?!node-\d)[A-Za-z0-9][\w.-]{0,63}")
"""The name of a coordinator or an agent."""


@dataclass(frozen=True)
class KeyPair:
    """The keys of one process in ZeroMQ's text format: 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> KeyPair:
        if not zmq.has("curve"):
            raise LaunchError(
                "links cannot be sealed: this ZeroMQ was built without CURVE; install a published wheel of pyzmq, "
                "or set processes.sealed = false to send everything unencrypted"
            )
        return cls(*zmq.curve_keypair())


def make_keys(folder: Path, nodes: int, force: bool = False) -> tuple[list[NodeId], list[NodeId]]:
    """Make a key pair for each of nodes 0 to nodes − 1 that has none. Returns the nodes with new and with kept keys.

    With `force`, all nodes get new keys.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _nodes(folder)
    except OSError as error:
        raise LaunchError(f"keys: cannot write to the folder {str(folder)!r}: {error.strerror}") from error
    kept = [] if force else [node for node in range(nodes) if _exists(folder, node, SECRET)]
    made = [node for node in range(nodes) if node not in kept]
    for path in [] if force else [_file(folder, node, kind) for node in range(nodes) for kind in (PUBLIC, SECRET)]:
        if path.is_symlink() and not os.path.exists(path):
            raise LaunchError(f"keys: no keys were made: {_dangling(path)}")
    without_secret = [] if force else [node for node in made if node in found]
    if without_secret:
        raise LaunchError(
            f"keys: {_describe(without_secret)} in {str(folder)!r} a public key without a secret key, which may be "
            "elsewhere: no keys were made; choose another folder, or replace them with --force"
        )
    for node in made:
        pair = KeyPair.fresh()
        _write(_file(folder, node, SECRET), pair, force)
        _write(_file(folder, node, PUBLIC), pair, force)
    for node in kept:
        if not _exists(folder, node, PUBLIC):
            _write(_file(folder, node, PUBLIC), read_pair(folder, node), force)
    return made, kept


def read_pair(folder: Path, node: NodeId, listed: bytes | None = None) -> KeyPair:
    """Read a node's key pair.

    Raises `LaunchError` if it is missing or malformed, if other users can read it, or if its public key differs from
    `listed`, the key that the other nodes expect.
    """
    path = _file(folder, node, SECRET)
    public, secret, problems = _read(path)
    problems += _too_open(path)
    if public is None or secret is None or problems:
        raise LaunchError(_describe_problems(folder, problems))
    if listed is not None and public != listed:
        raise LaunchError(
            f"keys: the pair in {str(path)!r} is not the pair that the run began with, so other nodes would reject "
            "this node; do not change keys during a run, and start the run again"
        )
    return KeyPair(public, secret)


def read_public(folder: Path, nodes: Iterable[NodeId]) -> dict[NodeId, bytes]:
    """Read the public keys of `nodes`. Raises `LaunchError` if one is missing, malformed or shared by two nodes."""
    keys: dict[NodeId, bytes] = {}
    problems: list[str] = []
    for node in nodes:
        public, _, wrong = _read(_file(folder, node, PUBLIC))
        problems += wrong
        if public is not None:
            keys[node] = public
    problems += _shared(keys)
    if problems:
        raise LaunchError(_describe_problems(folder, problems))
    return keys


def make_named_keys(folder: Path, names: Collection[str], force: bool = False) -> tuple[list[str], list[str]]:
    """Make a key pair for the coordinator or an agent of each name that has none. Returns new and kept names."""
    for name in names:
        if not MACHINE_NAME.fullmatch(name):
            raise LaunchError(f"keys: {name!r}: expected a name of letters, digits and . _ -, and not one of a node")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"keys: cannot write to the folder {str(folder)!r}: {error.strerror}") from error
    kept = [name for name in names if not force and (folder / f"{name}{SECRET}").exists()]
    made = [name for name in names if name not in kept]
    for name in made:
        pair = KeyPair.fresh()
        _write(folder / f"{name}{SECRET}", pair, force)
        _write(folder / f"{name}{PUBLIC}", pair, force)
    return made, kept


def read_pair_file(path: Path) -> KeyPair:
    """Read a key pair from its secret file. Raises `LaunchError` if it is invalid, or if other users can read it."""
    if path.suffix != SECRET:
        raise LaunchError(f"keys: {str(path)!r}: expected the file of a secret key, whose name ends in {SECRET!r}")
    public, secret, problems = _read(path)
    problems += _too_open(path)
    if public is None or secret is None or problems:
        raise LaunchError(_describe_problems(path.parent, problems))
    return KeyPair(public, secret)


def read_trusted(paths: Iterable[Path]) -> dict[str, bytes]:
    """Read public keys by name, from files and from all `.key` files of folders. Raises `LaunchError`."""
    keys: dict[str, bytes] = {}
    problems: list[str] = []
    for given in paths:
        files = sorted(given.glob(f"*{PUBLIC}")) if given.is_dir() else [given]
        if not files:
            problems.append(f"there is no public key ({PUBLIC}) in the folder {str(given)!r}")
        for path in files:
            public, _, wrong = _read(path)
            problems += wrong + _too_open(path)
            if public is not None:
                keys[path.stem] = public
    if problems:
        raise LaunchError("keys: public keys cannot be used:" + "".join(f"\n  - {problem}" for problem in problems))
    return keys


def list_keys(folder: Path) -> list[tuple[NodeId, str, bool]]:
    """List every node in `folder`: its public key or what is wrong with it, and whether its secret key is here."""
    found = []
    for node in _known(folder):
        public, _, problems = _read(_file(folder, node, PUBLIC))
        shown = problems[0] if public is None else public.decode()
        found.append((node, shown, _exists(folder, node, SECRET)))
    return found


def check_keys(folder: Path, nodes: Collection[NodeId] | None = None) -> list[str]:
    """List what is wrong with the keys of `nodes`, or of all nodes in the folder."""
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
                "copy the right file here, or replace both with --force"
            )
    return list(dict.fromkeys(_too_open(folder) + problems)) + _shared(keys)


def require_keys(folder: Path, nodes: Collection[NodeId]) -> None:
    """Raise `LaunchError` unless the keys of `nodes` are all valid."""
    problems = check_keys(folder, nodes)
    if problems:
        raise LaunchError(_describe_problems(folder, problems))


def _describe_problems(folder: Path, problems: list[str]) -> str:
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
    """The nodes that have a key of either kind. Raises `OSError` if the folder cannot be listed and entered."""
    os.stat(os.path.join(folder, "."))
    return {int(match[1]) for entry in os.listdir(folder) if (match := NAME.fullmatch(entry))}


def _file(folder: Path, node: NodeId, suffix: str) -> Path:
    return folder / f"node-{node}{suffix}"


def _exists(folder: Path, node: NodeId, suffix: str) -> bool:
    return os.path.exists(_file(folder, node, suffix))  # unlike Path.exists, raises nothing if access is denied


def _write(path: Path, pair: KeyPair, force: bool) -> None:
    """Write a ZeroMQ certificate.

    Other users can never read a secret key, a half-written file never has the final name, and an existing file is
    replaced only with `force`.
    """
    is_secret = path.suffix == SECRET
    content = "secret: do not share it" if is_secret else "public: for all processes that this node connects to"
    lines = [f"# A CURVE certificate of ZeroMQ, {content}", "metadata", "curve"]
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
    """Read the public key, the secret key if it is a secret file, and what is wrong with the file."""
    wants_secret = path.suffix == SECRET
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe may block
            return None, None, [f"{str(path)!r} is not a regular file; remove it, and copy the certificate here"]
        public, secret = zmq.auth.load_certificate(path)
    except FileNotFoundError:
        missing = f"{str(path)!r} is missing; 'shoal keys make' makes the missing keys"
        return None, None, [_dangling(path) if path.is_symlink() else missing]
    except OSError as error:
        return None, None, [f"{str(path)!r} cannot be read: {error.strerror}"]
    except (ValueError, IndexError):
        return None, None, [_malformed(path, "it has no public key")]
    if not _is_key(public):
        return None, None, [_malformed(path, "its public key is not 40 characters of Z85")]
    if not wants_secret:
        leak = f"{str(path)!r} contains a secret key, though others may read it; replace both with --force"
        return public, None, [] if secret is None else [leak]
    if secret is None or not _is_key(secret):
        return None, None, [_malformed(path, "it has no secret key of 40 characters of Z85")]
    if zmq.curve_public(secret) != public:
        return None, None, [_malformed(path, "its secret key and its public key are not a pair")]
    return public, secret, []


def _malformed(path: Path, why: str) -> str:
    return f"{str(path)!r} is not a certificate of ZeroMQ: {why}; copy it here again, or replace it with --force"


def _dangling(path: Path) -> str:
    return f"{str(path)!r} is a link to a file that does not exist; remove it, or replace both with --force"


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


def _too_open(path: Path) -> list[str]:
    """List the permissions of a file, folder or link target that let other users read a secret, or add keys."""
    try:
        status = path.stat()
    except OSError:
        return []  # unreadable, which `_read` reports
    problems = _too_open(path.resolve().parent) if path.is_symlink() else []
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), ROOT):
        problems.append(
            f"{str(path)!r} belongs to user id {status.st_uid}, who may change it and add keys; "
            "chown it, or use keys of your own"
        )
    elif path.suffix == SECRET and mode & 0o077:
        problems.append(
            f"{str(path)!r} has mode {mode:04o}: other users may read this secret key; chmod 600 it, or replace it"
        )
    elif mode & 0o022:
        problems.append(f"{str(path)!r} has mode {mode:04o}: other users may write to it, and add keys; chmod go-w it")
    return problems


def _shared(keys: dict[NodeId, bytes]) -> list[str]:
    """List the nodes that have the same key."""
    owners: dict[bytes, list[NodeId]] = {}
    for node, key in keys.items():
        owners.setdefault(key, []).append(node)
    return [
        f"nodes {', '.join(map(str, nodes))} have the same key: they cannot be distinguished; replace it with --force"
        for nodes in owners.values()
        if len(nodes) > 1
    ]


def _describe(nodes: list[NodeId]) -> str:
    names = ", ".join(map(str, nodes[:5])) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
    return f"node {names} has" if len(nodes) == 1 else f"nodes {names} have"
