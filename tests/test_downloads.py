"""Downloads: resumed after interruptions, checked, and errors with manual steps."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from file_server import CONTENT, MD5, Server, names
from shoal.data import DATASETS, downloads
from shoal.data.downloads import download
from shoal.data.publishers import PUBLISHERS, PublishedFile
from shoal.errors import DataError

pytestmark = pytest.mark.usefixtures("data_folders")


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
