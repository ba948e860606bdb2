"""The store: downloads that go on, checksums, what is said when something is missing, and the `shoal data` commands."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from shoal.data import DATASETS, downloads, store
from shoal.data.decoded import cache_folder, decoded, is_decoded
from shoal.data.downloads import download
from shoal.data.plots import draw_holdings
from shoal.data.publishers import PUBLISHERS, Published, Publisher
from shoal.errors import DataError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


@dataclass
class Server:
    """A web server on this machine, and what it was asked for."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    """Whether it knows how to go on in the middle."""
    cuts: list[int] = field(default_factory=list)
    """After how many bytes it hangs up, one connection after another; then no more."""
    status: int = 200
    says_length: bool = True
    asked: list[str | None] = field(default_factory=list)
    """The range of each request."""

    def file(self, name: str = "data.tar.gz", md5: str | None = MD5) -> Published:
        return Published(name, f"{self.url}/{name}", len(CONTENT), md5)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            self.close_connection = True
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and state.ranges else 0  # type: ignore[index]
            total = len(state.content)
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if wanted and state.ranges else 200)
            if wanted and state.ranges:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            if state.says_length:
                self.send_header("Content-Length", str(total - start))
            self.send_header("Connection", "close")
            self.end_headers()
            body = state.content[start:]
            self.wfile.write(body[: state.cuts.pop(0)] if state.cuts else body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


# Downloads


def test_a_file_is_downloaded_whole_and_once(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    path = download(server.file(), tmp_path / "a/b", lambda done, total: told.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "a/b") == ["data.tar.gz"]
    assert told[0] == (0, len(CONTENT))
    assert told[-1] == (len(CONTENT), len(CONTENT))
    download(server.file(), tmp_path / "a/b")
    assert server.asked == [None]


def test_a_connection_that_is_cut_is_taken_up_where_it_was(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 1]
    assert download(server.file(), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=100001-"]


def test_what_had_come_before_is_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    server.cuts = [70_000, 0]
    with pytest.raises(DataError, match=r"cut after 70,000 bytes.*fetch it again to go on"):
        download(server.file(), tmp_path)
    assert names(tmp_path) == ["data.tar.gz.part"]
    assert download(server.file(), tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == "bytes=70000-"


def test_a_server_that_always_hangs_up_is_not_asked_for_ever(server: Server, tmp_path: Path) -> None:
    server.cuts = [10] * 100
    with pytest.raises(DataError, match=r"data\.tar\.gz into "):
        download(server.file(), tmp_path)
    assert len(server.asked) == downloads.ATTEMPTS


@pytest.mark.parametrize("have", [CONTENT[:5000], b"something else", CONTENT + b"more"])
def test_a_server_that_cannot_go_on_is_asked_for_all_of_it(have: bytes, server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "data.tar.gz.part").write_bytes(have)
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


def test_a_server_that_does_not_say_how_much_it_sends_will_do(server: Server, tmp_path: Path) -> None:
    server.says_length = False
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


def test_all_had_come_but_for_the_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.tar.gz.part").write_bytes(CONTENT)
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


def test_more_had_come_than_there_is(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.tar.gz.part").write_bytes(CONTENT + b"x")
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("have", [b"", b"another file's beginning"])
def test_a_wrong_checksum_is_refused_and_leaves_nothing(have: bytes, server: Server, tmp_path: Path) -> None:
    server.content = CONTENT if have else CONTENT[:-1] + b"!"
    if have:
        (tmp_path / "data.tar.gz.part").write_bytes(have)
    with pytest.raises(DataError, match=f"and {MD5} was published; it was removed"):
        download(server.file(), tmp_path)
    assert names(tmp_path) == []


def test_without_a_published_checksum_what_comes_is_taken(server: Server, tmp_path: Path) -> None:
    server.content = b"new edition"
    assert download(server.file(md5=None), tmp_path).read_bytes() == b"new edition"


def test_a_file_that_is_another_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.tar.gz").write_bytes(b"mine")
    with pytest.raises(DataError, match="remove it to fetch"):
        download(server.file(), tmp_path)
    assert (tmp_path / "data.tar.gz").read_bytes() == b"mine"


@pytest.mark.parametrize("status", [404, 403, 500])
def test_what_the_server_does_not_have_is_said_with_the_manual_route(
    status: int, server: Server, tmp_path: Path
) -> None:
    server.status = status
    with pytest.raises(DataError, match=f"{status}.*put it as data.tar.gz into") as caught:
        download(server.file(), tmp_path / "folder")
    assert server.url in str(caught.value)
    assert not (tmp_path / "folder").exists()


def closed_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/x.tar.gz", "http://nowhere.invalid/x.tar.gz"])
def test_no_network_is_said_with_the_manual_route(url: str, tmp_path: Path) -> None:
    file = Published("x.tar.gz", url.format(port=closed_port()), 1, MD5)
    with pytest.raises(DataError, match=r"cannot be reached .*put it as x\.tar\.gz into") as caught:
        download(file, tmp_path / "folder")
    assert file.url in str(caught.value)
    assert str(tmp_path / "folder") in str(caught.value)
    assert not (tmp_path / "folder").exists()


def test_a_server_that_falls_silent_counts_as_cut(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file = Published("x", f"http://127.0.0.1:{silent.getsockname()[1]}/x", 1, MD5)
        with pytest.raises(DataError, match="put it as x into"):
            download(file, tmp_path)


def test_a_folder_that_cannot_be_made_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*SHOAL_DATA"):
        download(server.file(), tmp_path / "file/folder")


# The table of publishers


def test_every_entry_is_complete() -> None:
    for name, known in PUBLISHERS.items():
        assert name in DATASETS or name == "movielens-100k"
        assert bool(known.files) != bool(known.by_hand), name
        for file in known.files:
            assert file.url.endswith(f"/{file.name}")
            assert file.size > 0
            for checksum in (file.md5, *file.contents.values()):
                assert checksum is None or re.fullmatch("[0-9a-f]{32}", checksum), (name, file.name)
            assert bool(file.contents) == (known.reader is not None)


# What is decoded


def test_a_decoding_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")

    def fail(folder: Path) -> dict[str, np.ndarray]:
        np.save(folder / "large.npy", np.zeros(10))
        raise DataError("broken in the middle")

    for error, decode in ((DataError, fail), (ZeroDivisionError, lambda folder: 1 / 0), (KeyboardInterrupt, interrupt)):
        with pytest.raises(error):
            decoded("it", 1, [source], decode)  # type: ignore[arg-type]
        assert names(cache_folder()) == []
        assert not is_decoded("it")
    arrays = decoded("it", 1, [source], lambda folder: {"x": np.arange(3)})
    assert arrays["x"].tolist() == [0, 1, 2]
    assert is_decoded("it")
    assert not is_decoded("i")


def interrupt(folder: Path) -> dict[str, np.ndarray]:
    raise KeyboardInterrupt


def test_another_source_or_version_is_decoded_anew(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")

    def decode(version: int, value: int) -> int:
        return int(decoded("it", version, [source], lambda folder: {"x": np.array([value])})["x"][0])

    assert [decode(1, 1), decode(1, 2), decode(2, 3)] == [1, 1, 3]
    source.write_text("longer")
    assert decode(2, 4) == 4


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="SHOAL_CACHE"):
        decoded("it", 1, [tmp_path / "file"], lambda folder: {})


# The commands


@pytest.fixture
def published(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """MNIST, as if published by our server: two small files."""
    files = (server.file("one.gz"), server.file("two.gz"))
    monkeypatch.setitem(PUBLISHERS, "mnist", Publisher("mnist", files))
    return server


def test_fetch_list_path_and_verify(published: Server, shoal: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "data/mnist"
    assert re.search(rf"mnist +600\.0 KB +no +no +{folder}", shoal("data", "list").out)
    assert shoal("data", "path", "mnist").out.strip() == str(folder)
    said = shoal("data", "fetch", "mnist")
    assert said.code == 0, said
    assert said.out.count("its checksum is right") == 2
    assert names(folder) == ["one.gz", "two.gz"]
    assert shoal("data", "fetch", "mnist").out.count("there already") == 2
    (folder / "one.gz").unlink()
    assert shoal("data", "fetch", "mnist").out.count("its checksum is right") == 1
    assert re.search(r"mnist +600\.0 KB +yes", shoal("data", "list").out)
    said = shoal("data", "verify", "mnist")
    assert said.code == 0
    assert said.out.count("as published") == 2
    (folder / "two.gz").write_bytes(b"other")
    said = shoal("data", "verify", "mnist")
    assert said.code == 1
    assert "not sound" in said.out
    assert MD5 in said.out


def test_fetch_goes_on_after_it_was_cut(published: Server, shoal: Callable) -> None:
    published.cuts = [100, 0]
    assert shoal("data", "fetch", "mnist").code == 2
    assert shoal("data", "fetch", "mnist").code == 0
    assert published.asked == [None, "bytes=100-", "bytes=100-", None]


def test_fetch_without_a_network_names_all_files(published: Server, shoal: Callable) -> None:
    published.status = 404
    said = shoal("data", "fetch", "mnist")
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert "one.gz" in said.err
    assert f"{published.url}/two.gz" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fetch", "cifr10"], ["unknown dataset 'cifr10'; did you mean 'cifar10'?"]),
        (["fetch", "digits"], ["has no publisher"]),
        (["fetch", "femnist"], ["preprocess.sh", "data/femnist", "LEAF"]),
        (["verify", "shakespeare"], ["no checksums are published", "preprocess.sh"]),
        (["verify", "cifar100"], ["shoal data fetch cifar100"]),
        (["path", "nothing"], ["unknown dataset 'nothing'"]),
        (["plot", "none.toml"], ["there is no file 'none.toml'"]),
        (["plot", "small.toml", "--out", "missing/x.png"], ["cannot write 'missing/x.png'"]),
    ],
)
def test_wrong_commands_are_refused(arguments: list[str], words: list[str], shoal: Callable, small: Path) -> None:
    said = shoal("data", *arguments)
    assert said.code == 2, said
    assert said.err.startswith("error: ")
    for word in words:
        assert word in said.err


def test_a_folder_of_the_operating_system_is_looked_in_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "usr"
    place.mkdir()
    known = dataclasses.replace(PUBLISHERS["fashion-mnist"], elsewhere=(place,))
    monkeypatch.setitem(PUBLISHERS, "fashion-mnist", known)
    with pytest.raises(DataError):
        store.sources("fashion-mnist")
    for file in known.files:
        (place / file.name).write_bytes(b"")
    assert {path.parent for path in store.sources("fashion-mnist")} == {place}
    mine = tmp_path / "data/fashion-mnist"
    mine.mkdir(parents=True)
    (mine / known.files[0].name).write_bytes(b"")
    assert store.sources("fashion-mnist")[0].parent == mine  # one's own come first
    with pytest.raises(DataError):
        store.sources("fashion-mnist", tmp_path)  # a path of one's own is the only place


@pytest.mark.parametrize("damage", [False, True])
def test_a_zip_without_a_published_checksum_is_at_least_undamaged(
    damage: bool, tmp_path: Path, shoal: Callable
) -> None:
    path = tmp_path / "data/movielens/ml-latest-small.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ratings.csv", "1,2,3.5,4\n" * 100)
    if damage:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    said = shoal("data", "verify", "movielens")
    assert said.code == int(damage)
    assert ("ratings.csv in it is damaged" if damage else "gives no checksum") in said.out


# Who holds what


def size_of(png: Path) -> tuple[int, int]:
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_plot_draws_who_holds_what(shoal: Callable, small: Path, tmp_path: Path) -> None:
    said = shoal("data", "plot", "small.toml", "--set", "nodes=8")
    assert said.code == 0, said
    assert "8 nodes hold" in said.out
    assert "of 10 classes; drawn to who-holds-what.png" in said.out
    assert size_of(tmp_path / "who-holds-what.png")[0] > 400


@pytest.mark.parametrize(("nodes", "classes"), [(1, 1), (1, 2), (16, 10), (40, 26), (41, 10), (5, 100), (3000, 62)])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_any_number_of_nodes_and_classes_can_be_drawn(nodes: int, classes: int, ending: str, tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(0.5, (nodes, classes))
    counts[0, 0] = 700
    draw_holdings(counts, tmp_path / f"x.{ending}")
    assert (tmp_path / f"x.{ending}").stat().st_size > 1000
    if ending == "png":
        width, height = size_of(tmp_path / "x.png")
        assert width <= 2400
        assert height <= 2000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to draw"):
        draw_holdings(np.zeros((3, 4), np.int64), tmp_path / "x.png")
    assert not os.path.exists(tmp_path / "x.png")
