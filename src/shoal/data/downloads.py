"""Downloads that resume after an interruption. A file gets its final name when it is complete and verified."""

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

TIMEOUT = 30.0
"""Seconds without data after which a connection counts as interrupted."""
ATTEMPTS = 5
"""Connections to make before giving up. A connection that brings no data ends the attempts."""

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes so far, and with the total if the server reports it."""


def download(file: PublishedFile, folder: Path, progress: Progress = lambda done, total: None) -> Path:
    """Download `file` to `folder` unless it exists there. Return its path.

    Incomplete data are in a file with the suffix ".part", from which a download resumes. Raises `DataError` if the file
    cannot be downloaded, with instructions to get it in another way, or if it differs from the published one.
    """
    path = folder / file.name
    if path.exists():
        if file.md5 is not None and md5(path) != file.md5:
            raise DataError(f"{path} exists and differs from the published file; remove it to fetch the published one")
        return path
    part = folder / f"{file.name}{UNFINISHED}"
    try:
        _complete(file, part, progress)
        found = md5(part)
        if file.md5 is not None and found != file.md5:
            part.unlink()
            raise DataError(
                f"{file.url}: the download has the md5 {found}; expected {file.md5}, as published. It was removed. "
                "Fetch it again; if that does not help, the file was changed on the way or by its publisher"
            )
        os.replace(part, path)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error.strerror or error}; set SHOAL_DATA to a folder with write access"
        ) from error
    return path


class _InterruptedError(Exception):
    """The connection ended before the end of the file."""


def _complete(file: PublishedFile, part: Path, progress: Progress) -> None:
    """Connect until the file in `part` is complete. Raises `DataError` if no further connection helps."""
    for attempt in range(1, ATTEMPTS + 1):
        before = _size(part)
        try:
            _receive(file, part, progress)
            return
        except _InterruptedError as interruption:
            if attempt == ATTEMPTS or _size(part) <= before:
                raise DataError(
                    f"{file.url}: the connection was interrupted after {_size(part):,} bytes ({interruption}); "
                    f"fetch it again to resume, or {_advice(file, part)}"
                ) from interruption


def _receive(file: PublishedFile, part: Path, progress: Progress) -> None:
    """Use one connection to receive the rest of `part`, or all of it from a server that cannot resume."""
    have = _size(part)
    request = urllib.request.Request(file.url, headers={"User-Agent": "shoal", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                if error.headers.get("Content-Range", "").rpartition("/")[2] != str(have):
                    part.unlink()  # longer than the file: it belongs to another version
                    _receive(file, part, progress)
                return
            raise DataError(
                f"{file.url}: the server sent {error.code} {error.reason}; try again later, or {_advice(file, part)}"
            ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{file.url} cannot be reached ({reason}); {_advice(file, part)}") from error
    with response:
        resumes = response.status == http.HTTPStatus.PARTIAL_CONTENT and response.headers.get(
            "Content-Range", ""
        ).startswith(f"bytes {have}-")
        start = have if resumes else 0
        total = None if response.length is None else start + response.length
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if resumes else "wb") as out:
            progress(start, total)
            while chunk := _read(response):
                out.write(chunk)
                progress(out.tell(), total)
            if total is not None and out.tell() < total:
                raise _InterruptedError(f"{total:,} were announced")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(str(error) or type(error).__name__) from error


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _advice(file: PublishedFile, part: Path) -> str:
    return f"download it in another way and save it as {file.name} in {part.parent}"
