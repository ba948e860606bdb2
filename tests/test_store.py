"""The store: resumed downloads, checksums, errors for missing files, and the `shoal data` commands."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import os
import pickle
import re
import resource
import socket
import struct
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from shoal.data import DATASETS, Dataset, downloads, store
from shoal.data.arrays import ArrayFiles
from shoal.data.cifar import Cifar10
from shoal.data.decoded import cache_folder, is_decoded, load_decoded
from shoal.data.downloads import download
from shoal.data.idx import Mnist
from shoal.data.leaf import Femnist, LeafSynthetic, Reddit, Sent140, Shakespeare
from shoal.data.movielens import Movielens
from shoal.data.plots import draw_partition
from shoal.data.publishers import PUBLISHERS, PublishedFile, Publisher
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
    """A local web server that records its requests."""

    url: str = ""
    content: bytes = CONTENT
    supports_ranges: bool = True
    """Whether the server supports range requests."""
    cuts: list[int] = field(default_factory=list)
    """Numbers of bytes after which successive connections are closed; later connections stay open."""
    status: int = 200
    sends_length: bool = True
    requested_ranges: list[str | None] = field(default_factory=list)
    """The range header of each request."""

    def file(self, name: str = "data.tar.gz", md5: str | None = MD5) -> PublishedFile:
        return PublishedFile(name, f"{self.url}/{name}", len(CONTENT), md5)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.requested_ranges.append(wanted)
            self.close_connection = True
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and state.supports_ranges else 0  # type: ignore[index]
            total = len(state.content)
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if wanted and state.supports_ranges else 200)
            if wanted and state.supports_ranges:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            if state.sends_length:
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


def test_a_file_is_downloaded_completely_and_once(server: Server, tmp_path: Path) -> None:
    progress: list[tuple[int, int | None]] = []
    path = download(server.file(), tmp_path / "a/b", lambda done, total: progress.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "a/b") == ["data.tar.gz"]
    assert progress[0] == (0, len(CONTENT))
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    download(server.file(), tmp_path / "a/b")
    assert server.requested_ranges == [None]


def test_an_interrupted_download_resumes_at_its_position(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 1]
    assert download(server.file(), tmp_path).read_bytes() == CONTENT
    assert server.requested_ranges == [None, "bytes=100000-", "bytes=100001-"]


def test_a_partial_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    server.cuts = [70_000, 0]
    with pytest.raises(DataError, match=r"interrupted after 70,000 bytes.*fetch it again to resume"):
        download(server.file(), tmp_path)
    assert names(tmp_path) == ["data.tar.gz.part"]
    assert download(server.file(), tmp_path).read_bytes() == CONTENT
    assert server.requested_ranges[-1] == "bytes=70000-"


def test_the_number_of_download_attempts_is_limited(server: Server, tmp_path: Path) -> None:
    server.cuts = [10] * 100
    with pytest.raises(DataError, match=r"data\.tar\.gz in "):
        download(server.file(), tmp_path)
    assert len(server.requested_ranges) == downloads.ATTEMPTS


@pytest.mark.parametrize("have", [CONTENT[:5000], b"something else", CONTENT + b"more"])
def test_a_server_without_ranges_sends_the_complete_file(have: bytes, server: Server, tmp_path: Path) -> None:
    server.supports_ranges = False
    (tmp_path / "data.tar.gz.part").write_bytes(have)
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


def test_a_response_without_a_length_is_accepted(server: Server, tmp_path: Path) -> None:
    server.sends_length = False
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


def test_a_complete_partial_file_gives_the_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.tar.gz.part").write_bytes(CONTENT)
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


def test_a_partial_file_that_is_too_long_gives_the_correct_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.tar.gz.part").write_bytes(CONTENT + b"x")
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("have", [b"", b"another file's beginning"])
def test_a_wrong_checksum_is_rejected_and_leaves_no_file(have: bytes, server: Server, tmp_path: Path) -> None:
    server.content = CONTENT if have else CONTENT[:-1] + b"!"
    if have:
        (tmp_path / "data.tar.gz.part").write_bytes(have)
    with pytest.raises(DataError, match=f"expected {MD5}, as published. It was removed"):
        download(server.file(), tmp_path)
    assert names(tmp_path) == []


def test_without_a_published_checksum_any_content_is_accepted(server: Server, tmp_path: Path) -> None:
    server.content = b"new edition"
    assert download(server.file(md5=None), tmp_path).read_bytes() == b"new edition"


def test_a_different_file_of_the_same_name_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.tar.gz").write_bytes(b"mine")
    with pytest.raises(DataError, match="remove it to fetch"):
        download(server.file(), tmp_path)
    assert (tmp_path / "data.tar.gz").read_bytes() == b"mine"


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_file_missing_on_the_server_is_an_error_with_manual_steps(
    status: int, server: Server, tmp_path: Path
) -> None:
    server.status = status
    with pytest.raises(DataError, match=f"{status}.*save it as data.tar.gz in") as caught:
        download(server.file(), tmp_path / "folder")
    assert server.url in str(caught.value)
    assert not (tmp_path / "folder").exists()


def closed_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/x.tar.gz", "http://nowhere.invalid/x.tar.gz"])
def test_no_network_is_an_error_with_manual_steps(url: str, tmp_path: Path) -> None:
    file = PublishedFile("x.tar.gz", url.format(port=closed_port()), 1, MD5)
    with pytest.raises(DataError, match=r"cannot be reached .*save it as x\.tar\.gz in") as caught:
        download(file, tmp_path / "folder")
    assert file.url in str(caught.value)
    assert str(tmp_path / "folder") in str(caught.value)
    assert not (tmp_path / "folder").exists()


def test_a_server_that_times_out_counts_as_interrupted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        file = PublishedFile("x", f"http://127.0.0.1:{unresponsive.getsockname()[1]}/x", 1, MD5)
        with pytest.raises(DataError, match="save it as x in"):
            download(file, tmp_path)


def test_the_error_names_a_folder_that_cannot_be_created(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*SHOAL_DATA"):
        download(server.file(), tmp_path / "file/folder")


# The table of publishers


def test_every_entry_is_complete() -> None:
    for name, known in PUBLISHERS.items():
        assert name in DATASETS or name == "movielens-100k"
        assert bool(known.files) != bool(known.instructions), name
        for file in known.files:
            assert file.url.endswith(f"/{file.name}")
            assert file.size > 0
            for checksum in (file.md5, *file.contents.values()):
                assert checksum is None or re.fullmatch("[0-9a-f]{32}", checksum), (name, file.name)
            assert bool(file.contents) == (known.reader is not None)


# The decoded cache


def test_a_failed_decoding_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")

    def fail(folder: Path) -> dict[str, np.ndarray]:
        np.save(folder / "large.npy", np.zeros(10))
        raise DataError("broken in the middle")

    for error, decode in ((DataError, fail), (ZeroDivisionError, lambda folder: 1 / 0), (KeyboardInterrupt, interrupt)):
        with pytest.raises(error):
            load_decoded("it", 1, [source], decode)  # type: ignore[arg-type]
        assert names(cache_folder()) == []
        assert not is_decoded("it")
    arrays = load_decoded("it", 1, [source], lambda folder: {"x": np.arange(3)})
    assert arrays["x"].tolist() == [0, 1, 2]
    assert is_decoded("it")
    assert not is_decoded("i")


def interrupt(folder: Path) -> dict[str, np.ndarray]:
    raise KeyboardInterrupt


def test_another_source_or_version_is_decoded_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")

    def decode(version: int, value: int) -> int:
        return int(load_decoded("it", version, [source], lambda folder: {"x": np.array([value])})["x"][0])

    assert [decode(1, 1), decode(1, 2), decode(2, 3)] == [1, 1, 3]
    source.write_text("longer")
    assert decode(2, 4) == 4


def test_the_error_names_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="SHOAL_CACHE"):
        load_decoded("it", 1, [tmp_path / "file"], lambda folder: {})


@pytest.mark.parametrize("damage", ["empty", "missing", "no manifest"])
def test_a_damaged_cache_entry_is_decoded_again(damage: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    load_decoded("it", 1, [source], lambda folder: {"x": np.arange(3), "y": np.arange(2)})
    folder = next(cache_folder().iterdir())
    if damage == "empty":
        (folder / "y.npy").write_bytes(b"")
    else:
        (folder / ("y.npy" if damage == "missing" else "manifest.json")).unlink()
    arrays = load_decoded("it", 1, [source], lambda folder: {"x": np.arange(4), "y": np.arange(5)})
    assert (len(arrays["x"]), len(arrays["y"])) == (4, 5)
    assert names(cache_folder()) == [folder.name]


def test_cache_entries_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        load_decoded("it", 1, [], lambda folder: {"x": np.arange(3)})
    finally:
        os.umask(before)
    folder = next(cache_folder().iterdir())
    assert folder.stat().st_mode & 0o777 == 0o755
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in folder.iterdir())


def test_old_temporary_folders_are_deleted(tmp_path: Path) -> None:
    for name, age in ((".it-old", 2 * 24 * 3600), (".it-new", 60)):
        folder = cache_folder() / name
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    load_decoded("it", 1, [], lambda folder: {"x": np.arange(3)})
    assert [name for name in names(cache_folder()) if name.startswith(".")] == [".it-new"]


def test_read_errors_and_write_errors_are_distinguished(tmp_path: Path) -> None:
    def reading(folder: Path) -> dict[str, np.ndarray]:
        raise OSError(errno.EIO, "Input/output error", str(tmp_path / "source"))

    def writing(folder: Path) -> dict[str, np.ndarray]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"cannot read its files: .*Input/output error.*source"):
        load_decoded("it", 1, [], reading)
    with pytest.raises(DataError, match=r"cannot write .*No space left"):
        load_decoded("it", 1, [], writing)
    with pytest.raises(DataError, match=r"cannot read .*absent"):
        load_decoded("it", 1, [tmp_path / "absent"], lambda folder: {})


# The commands


@pytest.fixture
def published(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """MNIST with two small files, published by the local server."""
    files = (server.file("one.gz"), server.file("two.gz"))
    monkeypatch.setitem(PUBLISHERS, "mnist", Publisher("mnist", files))
    return server


def test_fetch_list_path_and_verify(published: Server, shoal: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "data/mnist"
    assert re.search(rf"mnist +600\.0 KB +no +no +{folder}", shoal("data", "list").out)
    assert shoal("data", "path", "mnist").out.strip() == str(folder)
    result = shoal("data", "fetch", "mnist")
    assert result.code == 0, result
    assert result.out.count("its checksum is correct") == 2
    assert names(folder) == ["one.gz", "two.gz"]
    assert shoal("data", "fetch", "mnist").out.count("already here") == 2
    (folder / "one.gz").unlink()
    assert shoal("data", "fetch", "mnist").out.count("its checksum is correct") == 1
    assert re.search(r"mnist +600\.0 KB +yes", shoal("data", "list").out)
    result = shoal("data", "verify", "mnist")
    assert result.code == 0
    assert result.out.count("as published") == 2
    (folder / "two.gz").write_bytes(b"other")
    result = shoal("data", "verify", "mnist")
    assert result.code == 1
    assert "not valid" in result.out
    assert MD5 in result.out


def test_fetch_resumes_after_an_interruption(published: Server, shoal: Callable) -> None:
    published.cuts = [100, 0]
    assert shoal("data", "fetch", "mnist").code == 2
    assert shoal("data", "fetch", "mnist").code == 0
    assert published.requested_ranges == [None, "bytes=100-", "bytes=100-", None]


def test_fetch_without_a_network_names_all_files(published: Server, shoal: Callable) -> None:
    published.status = 404
    result = shoal("data", "fetch", "mnist")
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "one.gz" in result.err
    assert f"{published.url}/two.gz" in result.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
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
def test_invalid_commands_are_rejected(arguments: list[str], expected: list[str], shoal: Callable, small: Path) -> None:
    result = shoal("data", *arguments)
    assert result.code == 2, result
    assert result.err.startswith("error: ")
    for text in expected:
        assert text in result.err


def test_the_data_folder_of_the_operating_system_is_searched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "usr"
    place.mkdir()
    known = dataclasses.replace(PUBLISHERS["fashion-mnist"], system_folders=(place,))
    monkeypatch.setitem(PUBLISHERS, "fashion-mnist", known)
    with pytest.raises(DataError):
        store.sources("fashion-mnist")
    for file in known.files:
        (place / file.name).write_bytes(b"")
    assert {path.parent for path in store.sources("fashion-mnist")} == {place}
    mine = tmp_path / "data/fashion-mnist"
    mine.mkdir(parents=True)
    (mine / known.files[0].name).write_bytes(b"")
    assert store.sources("fashion-mnist")[0].parent == mine  # SHOAL_DATA comes first
    with pytest.raises(DataError):
        store.sources("fashion-mnist", tmp_path)  # an explicit path is the only place


@pytest.mark.parametrize("damage", [False, True])
def test_a_zip_without_a_published_checksum_is_checked_for_damage(
    damage: bool, tmp_path: Path, shoal: Callable
) -> None:
    path = tmp_path / "data/movielens/ml-latest-small.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ratings.csv", "userId,movieId,rating\n" + "1,2,3.5\n" * 100)
    if damage:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    result = shoal("data", "verify", "movielens")
    assert result.code == int(damage)
    assert ("ratings.csv is damaged" if damage else "so it cannot be compared") in result.out


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("dataset", ["movielens", "movielens-100k"])
def test_repacked_or_unpacked_ratings_are_verified_by_content(dataset: str, unpacked: bool, tmp_path: Path) -> None:
    stem, name, text = {
        "movielens": ("ml-latest-small", "ratings.csv", "userId,movieId,rating\n1,2,3.5\n"),
        "movielens-100k": (
            "ml-100k", "u.data",
            "".join(f"{1 + i % 943}\t{1 + i % 1682}\t{1 + i % 5}\t0\n" for i in range(100_000)),
        ),
    }[dataset]  # fmt: skip
    folder = tmp_path / "data/movielens" / stem
    folder.mkdir(parents=True)
    if unpacked:
        (folder / name).write_text(text)
    else:
        with zipfile.ZipFile(f"{folder}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{stem}/{name}", text)
    verification = next(store.verify(dataset))
    assert verification.valid, verification
    assert "ratings by" in verification.reason
    assert "so it cannot be compared" in verification.reason
    assert ("of the archive only" in verification.reason) == (dataset == "movielens-100k")
    assert "None" not in verification.reason
    if unpacked:
        (folder / name).write_text(text[: len(text) // 2])
        assert next(store.verify(dataset)).valid is False


def test_another_format_of_the_same_images_is_not_mistaken_for_the_archive(tmp_path: Path) -> None:
    folder = tmp_path / "data/cifar-10"
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    for name in ("cifar-10-binary.tar.gz", "cifar-10-matlab.tar.gz", "cifar-100-python.tar.gz"):
        (folder / name).write_bytes(b"")
    assert store.sources("cifar10") == [folder / "cifar-10-batches-py"]


# Malicious files


DEEP = "[" * 100_000 + "]" * 100_000


def leaf(folder: Path, x: str, y: str) -> Path:
    for split in ("train", "test"):
        (folder / split).mkdir()
        text = f'{{"users": ["u"], "num_samples": [1], "user_data": {{"u": {{"x": [{x}], "y": [{y}]}}}}}}'
        (folder / split / "a.json").write_text(text)
    return folder


def reddit(folder: Path, vocabulary: str) -> Reddit:
    (folder / "v.json").write_text(vocabulary)
    return Reddit(leaf(folder, '[["a"]]', '{"target_tokens": [["a"]]}'), vocab=folder / "v.json")


def counts(folder: Path, count: str) -> Reddit:
    return Reddit(leaf(folder, '[["a"]]', f'{{"target_tokens": [["a"]], "count_tokens": {count}}}'))


def batches(folder: Path, content: bytes) -> Cifar10:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(content)
    return Cifar10(folder)


def deep_label() -> bytes:
    data = pickle.dumps(np.zeros((1, 3072), np.uint8), 2)[2:-1]
    nested = b"]" * 100_000 + b"a" * 99_999
    return b"\x80\x02}(X\x04\x00\x00\x00data" + data + b"X\x06\x00\x00\x00labels]" + nested + b"au."


def tar(folder: Path, **headers: str) -> Cifar10:
    member = tarfile.TarInfo("data_batch_1")
    member.pax_headers = {f"GNU.sparse.{name}": value for name, value in headers.items()}
    (folder / "c.tar").write_bytes(member.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    return Cifar10(folder / "c.tar")


def long_header(folder: Path) -> Cifar10:
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, 8 << 30
    (folder / "c.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    return Cifar10(folder / "c.tar")


def images(folder: Path, side: int, values: int) -> Mnist:
    for split in ("train", "t10k"):
        content = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, side, side) + bytes(values)
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 2) + b"\0\1")
    return Mnist(folder)


def npy(shape: str, content: bytes = b"") -> bytes:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def npz(folder: Path, x: bytes) -> Path:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", npy("(10,)", bytes(10)))
    return folder / "a.npz"


def ratings(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ml-latest-small.zip", "w") as archive:
        archive.writestr("ratings.csv", "userId,movieId,rating\n" + "1,1,4\n" * 10)
    return folder / "ml-latest-small.zip"


def changed(file: Path, flag: int = 0, method: int | None = None) -> Path:
    """A zip whose headers contain a false flag or compression method."""
    content = bytearray(file.read_bytes())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(re.escape(signature), bytes(content)):
            content[found.start() + place] |= flag
            if method is not None:
                content[found.start() + place + 2] = method
    file.write_bytes(content)
    return file


HOSTILE: dict[str, Callable[[Path], Dataset]] = {
    "deep inputs": lambda f: Shakespeare(leaf(f, DEEP, '"a"')),
    "deep labels": lambda f: Femnist(leaf(f, str([0.0] * 784), DEEP)),
    "deep after quotes": lambda f: Shakespeare(leaf(f, '"\\\\\\"[", ' + DEEP, '"a"')),
    "numbers as text": lambda f: LeafSynthetic(leaf(f, '["1.5", 2]', "1")),
    "numbers as truth": lambda f: LeafSynthetic(leaf(f, "[true, 2]", "1")),
    "huge number": lambda f: LeafSynthetic(leaf(f, f"[{10**400}, 2]", "1")),
    "number of 5000 digits": lambda f: LeafSynthetic(leaf(f, f"[{'9' * 5000}, 2]", "1")),
    "huge label": lambda f: LeafSynthetic(leaf(f, "[1, 2]", str(10**30))),
    "sentiment as a list": lambda f: Sent140(leaf(f, '"good"', "[1]")),
    "sentiment as truth": lambda f: Sent140(leaf(f, '"good"', "true")),
    "one number as counts": lambda f: counts(f, "5"),
    "text as counts": lambda f: counts(f, '["0"]'),
    "deep vocabulary": lambda f: reddit(f, DEEP),
    "vocabulary beyond int32": lambda f: reddit(f, f'{{"<PAD>": 0, "<UNK>": 1, "a": {2**31 + 5}}}'),
    "deep label of an image": lambda f: batches(f, deep_label()),
    "pickle with a huge memo": lambda f: batches(f, b"\x80\x02]r\xff\xff\xff\x7f."),
    "sparse tar": lambda f: tar(f, major="0", minor="1", map="0,0", size=str(1 << 42), realsize=str(1 << 42)),
    "tar with a wrong map": lambda f: tar(f, major="0", minor="1", map="x,y", size="5", realsize="5"),
    "tar with a long header": long_header,
    "gzip bomb": lambda f: images(f, 2, 50_000_000),
    "images without pixels": lambda f: images(f, 0, 0),
    "npz that promises too much": lambda f: ArrayFiles(npz(f, npy("(1099511627776, 2)"))),
    "npz without numbers": lambda f: ArrayFiles(npz(f, npy("(10, 0)"))),
    "npz with a deep header": lambda f: ArrayFiles(npz(f, npy("(" * 5000))),
    "npz encrypted": lambda f: ArrayFiles(changed(npz(f, npy("(10, 1)", bytes(10))), flag=1)),
    "npz compressed otherwise": lambda f: ArrayFiles(changed(npz(f, npy("(10, 1)", bytes(10))), method=99)),
    "zip encrypted": lambda f: Movielens(path=changed(ratings(f), flag=1)),
    "zip compressed otherwise": lambda f: Movielens(path=changed(ratings(f), method=99)),
    "zip damaged": lambda f: Movielens(path=changed(ratings(f), method=8)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_malicious_files_are_rejected_in_little_memory(kind: str, tmp_path: Path) -> None:
    dataset = HOSTILE[kind](tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as caught:
        dataset.load(seed=0)
    assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def test_one_long_word_does_not_widen_all_words(tmp_path: Path) -> None:
    text = " ".join(["a" * 1_000_000, *(f"w{i}" for i in range(3000))])
    assert Sent140(leaf(tmp_path, f'"{text}"', "1")).load(seed=0).sizes == (3002,)
    assert sum(file.stat().st_size for file in cache_folder().rglob("*")) < 2_000_000


@pytest.mark.parametrize("change", [{"flag": 1}, {"method": 99}, {"method": 8}])
def test_a_zip_that_cannot_be_unpacked_is_invalid(change: dict[str, int], tmp_path: Path) -> None:
    assert not next(store.verify("movielens", changed(ratings(tmp_path), **change))).valid


# The partition plot


def size_of(png: Path) -> tuple[int, int]:
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_plot_draws_the_partition(shoal: Callable, small: Path, tmp_path: Path) -> None:
    result = shoal("data", "plot", "small.toml", "--set", "nodes=8")
    assert result.code == 0, result
    assert "8 nodes hold" in result.out
    assert "of 10 classes; drawn to who-holds-what.png" in result.out
    assert size_of(tmp_path / "who-holds-what.png")[0] > 400


@pytest.mark.parametrize(("nodes", "classes"), [(1, 1), (1, 2), (16, 10), (40, 26), (41, 10), (5, 100), (3000, 62)])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_any_number_of_nodes_and_classes_can_be_drawn(nodes: int, classes: int, ending: str, tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(0.5, (nodes, classes))
    counts[0, 0] = 700
    draw_partition(counts, tmp_path / f"x.{ending}")
    assert (tmp_path / f"x.{ending}").stat().st_size > 1000
    if ending == "png":
        width, height = size_of(tmp_path / "x.png")
        assert width <= 2400
        assert height <= 2000


def test_a_partition_without_samples_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to draw"):
        draw_partition(np.zeros((3, 4), np.int64), tmp_path / "x.png")
    assert not os.path.exists(tmp_path / "x.png")
