"""Keys: made once, never overwritten by accident, never read when others could, and checked before they are used."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

from conftest import CommandResult
from shoal.engines.processes.keys import KeyPair, check_keys, list_keys, make_keys, read_pair, read_public, require_keys
from shoal.errors import LaunchError

NODES = 3
OTHER_USER = 12_345
"""A user who is neither root nor anybody else."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", NODES)
    return tmp_path / "keys"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Making


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_every_node_gets_its_own_pair_with_a_private_secret_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        made, kept = make_keys(tmp_path / "deep" / "keys", NODES)
    finally:
        os.umask(before)
    folder = tmp_path / "deep" / "keys"
    assert (made, kept) == ([0, 1, 2], [])
    assert sorted(contents(folder)) == sorted(f"node-{n}.{end}" for n in range(NODES) for end in ("key", "key_secret"))
    pairs = [read_pair(folder, node) for node in range(NODES)]
    assert len({pair.secret for pair in pairs}) == NODES
    for node, pair in enumerate(pairs):
        assert zmq.curve_public(pair.secret) == pair.public == read_public(folder, [node])[node]
        assert mode(folder / f"node-{node}.key_secret") == 0o600
        assert pair.secret not in (folder / f"node-{node}.key").read_bytes()
    assert mode(folder) & 0o077 == 0
    assert check_keys(folder) == []


def test_files_are_certificates_that_zeromq_reads(keys: Path) -> None:
    public, secret = zmq.auth.load_certificate(keys / "node-1.key_secret")
    assert KeyPair(public, secret or b"") == read_pair(keys, 1)
    assert zmq.auth.load_certificate(keys / "node-1.key") == (public, None)
    assert len(zmq.auth.load_certificates(keys)) == NODES


def test_existing_keys_are_kept_and_missing_keys_are_made(keys: Path) -> None:
    before = contents(keys)
    assert make_keys(keys, NODES + 2) == ([3, 4], [0, 1, 2])
    after = contents(keys)
    assert {name: after[name] for name in before} == before
    (keys / "node-1.key").unlink()  # a public key can be distinguished from the secret one
    make_keys(keys, NODES)
    assert contents(keys)["node-1.key"] == before["node-1.key"]
    assert check_keys(keys, range(NODES + 2)) == []


def test_force_replaces_all_keys(keys: Path) -> None:
    before = contents(keys)
    assert make_keys(keys, NODES, force=True) == ([0, 1, 2], [])
    after = contents(keys)
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    assert check_keys(keys) == []


def test_no_key_is_made_for_a_public_key_without_its_secret_key(keys: Path) -> None:
    (keys / "node-2.key_secret").unlink()
    before = contents(keys)
    with pytest.raises(LaunchError, match=r"node 2 has in .* a public key without a secret key.*--force"):
        make_keys(keys, NODES + 1)
    assert contents(keys) == before
    make_keys(keys, NODES, force=True)
    assert check_keys(keys) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot write to the folder"):
        make_keys(tmp_path / "file", 1)


def test_the_repr_of_a_pair_hides_the_secret_key() -> None:
    pair = KeyPair.fresh()
    assert pair.secret.decode() not in repr(pair)
    assert pair.secret.decode() not in str(pair)


# Checking


def spoil(keys: Path, what: str) -> None:
    public, secret = keys / "node-1.key", keys / "node-1.key_secret"
    if what == "public missing":
        public.unlink()
    elif what == "secret missing":
        secret.unlink()
    elif what == "empty":
        public.write_text("")
    elif what == "cut":
        secret.write_bytes(secret.read_bytes()[:-20])
    elif what == "no value":
        public.write_text("public-key")
    elif what == "bad alphabet":
        public.write_text('public-key = "' + "~" * 40 + '"')
    elif what == "too large":
        public.write_text('public-key = "' + "#" * 40 + '"')
    elif what == "binary":
        secret.write_bytes(bytes(range(256)))
    elif what == "no pair":
        secret.write_text(f'public-key = "{public_of(public)}"\nsecret-key = "{KeyPair.fresh().secret.decode()}"')
    elif what == "another's secret":
        secret.write_bytes((keys / "node-0.key_secret").read_bytes())
    elif what == "one key for two":
        for end in ("key", "key_secret"):
            (keys / f"node-1.{end}").write_bytes((keys / f"node-0.{end}").read_bytes())
    elif what == "secret for all":
        secret.chmod(0o644)
    elif what == "secret for the group":
        secret.chmod(0o640)
    elif what == "secret in public":
        public.write_bytes(secret.read_bytes())
    elif what == "list for all to change":
        public.chmod(0o666)
    elif what == "folder for all to change":
        keys.chmod(0o777)
    elif what == "a link to nothing":
        public.unlink()
        public.symlink_to("nowhere")
    elif what == "a link to itself":
        public.unlink()
        public.symlink_to(public.name)
    elif what == "a pipe":
        secret.unlink()
        os.mkfifo(secret, 0o600)
    elif what == "a folder":
        public.unlink()
        public.mkdir(mode=0o700)
    elif what == "a link to where all may write":
        (open_to_all := keys.parent / "open to all").mkdir()
        open_to_all.chmod(0o777)
        public.rename(open_to_all / "one.key")
        public.symlink_to(open_to_all / "one.key")


def public_of(path: Path) -> str:
    return zmq.auth.load_certificate(path)[0].decode()


INVALID = {
    "public missing": "node-1.key' is missing; 'shoal keys make'",
    "secret missing": "node-1.key_secret' is missing; 'shoal keys make'",
    "empty": "node-1.key' is not a certificate of ZeroMQ: it has no public key",
    "cut": "node-1.key_secret' is not a certificate of ZeroMQ: it has no secret key of 40 characters",
    "no value": "node-1.key' is not a certificate of ZeroMQ",
    "bad alphabet": "node-1.key' is not a certificate of ZeroMQ: its public key is not 40 characters of Z85",
    "too large": "node-1.key' is not a certificate of ZeroMQ: its public key is not 40 characters of Z85",
    "binary": "node-1.key_secret' is not a certificate of ZeroMQ",
    "no pair": "node-1.key_secret' is not a certificate of ZeroMQ: its secret key and its public key are not a pair",
    "another's secret": "node-1.key_secret' does not belong to 'node-1.key'",
    "one key for two": "nodes 0, 1 have the same key",
    "secret for all": "node-1.key_secret' has mode 0644: other users may read this secret key; chmod 600 it",
    "secret for the group": "node-1.key_secret' has mode 0640: other users may read this secret key; chmod 600 it",
    "secret in public": "node-1.key' contains a secret key",
    "list for all to change": "node-1.key' has mode 0666: other users may write to it, and add keys",
    "folder for all to change": "keys' has mode 0777: other users may write to it, and add keys",
    "a link to nothing": "node-1.key' is a link to a file that does not exist; remove it, or replace both with --force",
    "a link to itself": "node-1.key' cannot be read: ",
    "a pipe": "node-1.key_secret' is not a regular file; remove it",
    "a folder": "node-1.key' is not a regular file; remove it",
    "a link to where all may write": "open to all' has mode 0777: other users may write to it, and add keys",
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_keys_are_described_and_prevent_a_run(keys: Path, what: str) -> None:
    spoil(keys, what)
    (problem,) = check_keys(keys)
    assert INVALID[what] in problem
    with pytest.raises(LaunchError, match="links cannot be sealed") as rejected:
        require_keys(keys, range(NODES))
    assert INVALID[what] in str(rejected.value)


@pytest.mark.parametrize(
    "what", ["secret missing", "cut", "binary", "no pair", "secret for all", "secret for the group", "a pipe"]
)
def test_a_node_rejects_an_invalid_secret_key(keys: Path, what: str) -> None:
    spoil(keys, what)
    with pytest.raises(LaunchError) as rejected:
        read_pair(keys, 1)
    assert INVALID[what] in str(rejected.value)


@pytest.mark.parametrize("what", ["public missing", "empty", "too large", "one key for two"])
def test_an_allow_list_needs_the_keys_of_all_nodes(keys: Path, what: str) -> None:
    spoil(keys, what)
    with pytest.raises(LaunchError) as rejected:
        read_public(keys, range(NODES))
    assert INVALID[what] in str(rejected.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["", "node-1.key", "node-1.key_secret"])
def test_files_of_another_user_are_rejected(keys: Path, name: str) -> None:
    os.chown(keys / name, OTHER_USER, -1)
    (problem,) = check_keys(keys)
    assert f"{str(keys / name)!r} belongs to user id {OTHER_USER}" in problem
    with pytest.raises(LaunchError, match="links cannot be sealed"):
        require_keys(keys, range(NODES))


@pytest.fixture
def another_user(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As one who is not root, who owns the keys, in the folder that holds theirs."""
    monkeypatch.chdir(keys.parent)
    if os.geteuid() != 0:
        yield
        return
    keys.parent.chmod(0o755)  # those above do not matter to one who is there already
    for path in (keys, *keys.iterdir()):
        os.chown(path, OTHER_USER, -1)
    os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.usefixtures("another_user")
def test_a_folder_that_can_be_listed_but_not_entered_is_named() -> None:
    folder = Path("keys")
    assert check_keys(folder) == []
    folder.chmod(0o400)
    for look in (
        check_keys,
        list_keys,
        lambda folder: require_keys(folder, range(NODES)),
        lambda folder: make_keys(folder, NODES),
    ):
        with pytest.raises(LaunchError, match="the folder 'keys'") as rejected:
            look(folder)
        assert "Permission denied" in str(rejected.value)
        assert "makes one" not in str(rejected.value)
    for read in (lambda: read_pair(folder, 0), lambda: read_public(folder, [0])):
        with pytest.raises(LaunchError, match="cannot be read: Permission denied"):
            read()
    folder.chmod(0o700)


def test_a_pair_that_differs_from_the_listed_key_is_rejected(keys: Path) -> None:
    listed_key = read_public(keys, [1])[1]
    assert read_pair(keys, 1, listed_key).public == listed_key
    make_keys(keys, NODES, force=True)
    with pytest.raises(LaunchError, match=r"node-1\.key_secret' is not the pair that the run began with"):
        read_pair(keys, 1, listed_key)


@pytest.mark.parametrize("end", ["key", "key_secret"])
def test_only_force_replaces_a_dangling_link(keys: Path, end: str) -> None:
    (link := keys / f"node-1.{end}").unlink()
    link.symlink_to("nowhere")
    before = {path.name for path in keys.iterdir()}
    with pytest.raises(LaunchError, match=rf"node-1\.{end}' is a link to a file that does not exist; remove it"):
        make_keys(keys, NODES + 1)
    assert {path.name for path in keys.iterdir()} == before
    make_keys(keys, NODES, force=True)
    assert check_keys(keys) == []


def test_keys_of_absent_nodes_are_reported_as_missing(keys: Path) -> None:
    assert len(check_keys(keys, range(NODES + 1))) == 2
    with pytest.raises(LaunchError, match=r"node-9\.key' is missing"):
        read_public(keys, [9])


def test_other_files_in_the_folder_are_ignored(keys: Path) -> None:
    for name in ("README", "node-x.key", "node-01.key", "node-7.key.bak"):
        (keys / name).write_text("nothing")
    assert check_keys(keys) == []
    assert [node for node, _, _ in list_keys(keys)] == [0, 1, 2]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for look in (check_keys, list_keys):
        with pytest.raises(LaunchError, match="cannot be read: No such file or directory; 'shoal keys make'"):
            look(tmp_path / "nowhere")


# The command


def test_the_command_makes_lists_and_checks(shoal: Callable[..., CommandResult], tmp_path: Path) -> None:
    result = shoal("keys", "make", "keys", "--nodes", 3)
    assert (result.code, result.out.strip()) == (0, "made keys for nodes 0-2: keys")
    result = shoal("keys", "make", "keys", "--nodes", 4)
    assert result.out.strip() == "made keys for nodes 3; nodes 0-2 keep theirs (--force replaces them): keys"
    (tmp_path / "keys" / "node-3.key_secret").unlink()
    result = shoal("keys", "list", "keys")
    rows = [line.split() for line in result.out.splitlines() if line.strip()]
    assert [row[0] for row in rows[1:]] == ["0", "1", "2", "3"]
    assert [row[-1] for row in rows[1:]] == ["here", "here", "here", "elsewhere"]
    assert public_of(tmp_path / "keys" / "node-2.key") in result.out
    assert read_pair(tmp_path / "keys", 2).secret.decode() not in result.out
    result = shoal("keys", "check", "keys", "--nodes", 3)
    assert (result.code, result.out.strip()) == (0, "the keys of 3 nodes are valid: keys")


def test_the_command_describes_problems_and_solutions(shoal: Callable[..., CommandResult], tmp_path: Path) -> None:
    shoal("keys", "make", "keys", "--nodes", 2)
    (tmp_path / "keys" / "node-0.key_secret").chmod(0o644)
    result = shoal("keys", "check", "keys", "--nodes", 3)
    assert result.code == 2
    assert "3 problems" in result.err
    assert "chmod 600" in result.err
    assert "node-2.key_secret' is missing" in result.err
    (tmp_path / "empty").mkdir(mode=0o700)
    assert "there are no keys in 'empty'" in shoal("keys", "check", "empty").err
    assert shoal("keys", "check", "nowhere").code == 2
    for wrong in ("0", "-1", "many", "1.5"):
        assert shoal("keys", "make", "keys", "--nodes", wrong).code == 2


def test_names_that_look_like_markup_are_shown_as_they_are(shoal: Callable[..., CommandResult]) -> None:
    for command in ("make", "check"):
        result = shoal("keys", command, "[/b]", "--nodes", 2)
        assert result.code == 0, result.err
        assert result.out.strip().endswith("[/b]")


def test_a_narrow_terminal_still_shows_the_node_of_an_invalid_key(
    shoal: Callable[..., CommandResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shoal("keys", "make", "keys", "--nodes", 3)
    (tmp_path / "keys" / "node-1.key").write_text("nothing")
    lines = shoal("keys", "list", "keys").out.splitlines()
    assert [line.split()[0] for line in lines if line.strip().endswith("here")] == ["0", "1", "2"]
    assert public_of(tmp_path / "keys" / "node-2.key") in "".join(lines)


def test_a_file_that_another_process_writes_is_not_touched(tmp_path: Path) -> None:
    other = tmp_path / f".node-0.key_secret.{os.getpid()}"
    other.write_text("half of it")
    with pytest.raises(LaunchError, match="cannot write"):
        make_keys(tmp_path, 1)
    assert other.read_text() == "half of it"


@pytest.mark.parametrize(("nodes", "more"), [(10, None), (12, "and 2 more")])
def test_at_most_ten_problems_are_listed(nodes: int, more: str | None, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", nodes)
    for node in range(nodes):
        (tmp_path / "keys" / f"node-{node}.key_secret").chmod(0o640)
    with pytest.raises(LaunchError) as rejected:
        require_keys(tmp_path / "keys", range(nodes))
    _, *problems = str(rejected.value).splitlines()
    assert len(problems) == (10 if more is None else 11)
    assert problems[-1].endswith(more or "") is True
    assert all("read" in problem for problem in problems[:10])
