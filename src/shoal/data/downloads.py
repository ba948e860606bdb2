"""Downloads that go on where they were cut off, and are whole and checked before they bear their name."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from shoal.data.publishers import PublishedFile
from shoal.data.store import CHUNK, UNFINISHED, md5
from shoal.errors import DataError

PATIENCE = 30.0
"""Seconds without a byte after which a connection counts as cut."""
ATTEMPTS = 5
"""How often a connection that was cut is made again, as long as each brings something."""

Progress = Callable[[int, int | None], None]
"""Told how many bytes there are, and how many there will be, where the server says."""


def download(file: PublishedFile, folder: Path, progress: Progress = lambda done, total: None) -> Path:
    """`file` in `folder`, downloaded unless it is there; its path.

    What has come so far is in a file whose name ends in ".part", and is not asked for again. Raises `DataError` when
    the file cannot be had, which says how to get it by hand, or when it is not what was published.
    """
    path = folder / file.name
    if path.exists():
        if file.md5 is not None and md5(path) != file.md5:
            raise DataError(f"{path} is there already, and is not the file that was published; remove it to fetch that")
        return path
    part = folder / f"{file.name}{UNFINISHED}"
    try:
        _complete(file, part, progress)
        found = md5(part)
        if file.md5 is not None and found != file.md5:
            part.unlink()
            raise DataError(
                f"{file.url}: what came has the md5 {found}, and {file.md5} was published; it was removed. Fetch it "
                "again; if that does not help, the file was changed, on its way or by its publisher"
            )
        os.replace(part, path)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error.strerror or error}; set SHOAL_DATA to a folder that can be written"
        ) from error
    return path


class _CutError(Exception):
    """The connection ended before the file did."""


def _complete(file: PublishedFile, part: Path, progress: Progress) -> None:
    """Connect until all of the file is in `part`, or there is nothing more to be had."""
    for attempt in range(1, ATTEMPTS + 1):
        before = _size(part)
        try:
            _receive(file, part, progress)
            return
        except _CutError as cut:
            if attempt == ATTEMPTS or _size(part) <= before:
                raise DataError(
                    f"{file.url}: the connection was cut after {_size(part):,} bytes ({cut}); fetch it again to go on "
                    f"from there, or {_by_hand(file, part)}"
                ) from cut


def _receive(file: PublishedFile, part: Path, progress: Progress) -> None:
    """One connection: what is missing of `part`, or all of it from a server that does not know how to go on."""
    have = _size(part)
    request = urllib.request.Request(file.url, headers={"User-Agent": "shoal", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        with error:
            if have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                if error.headers.get("Content-Range", "").rpartition("/")[2] != str(have):
                    part.unlink()  # longer than the file: it was of another one
                    _receive(file, part, progress)
                return
            raise DataError(
                f"{file.url}: the server says {error.code} {error.reason}; try again later, or {_by_hand(file, part)}"
            ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{file.url} cannot be reached ({reason}); {_by_hand(file, part)}") from error
    with answer:
        goes_on = answer.status == http.HTTPStatus.PARTIAL_CONTENT and answer.headers.get(
            "Content-Range", ""
        ).startswith(f"bytes {have}-")
        start = have if goes_on else 0
        total = None if answer.length is None else start + answer.length
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if goes_on else "wb") as out:
            progress(start, total)
            while chunk := _read(answer):
                out.write(chunk)
                progress(out.tell(), total)
            if total is not None and out.tell() < total:
                raise _CutError(f"{total:,} were promised")


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(str(error) or type(error).__name__) from error


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _by_hand(file: PublishedFile, part: Path) -> str:
    return f"download it in another way and put it as {file.name} into {part.parent}"
