"""Writing an array to a file piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


class NpyWriter:
    """Appends rows to an .npy file, so that the array is never in memory as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._header: dict[str, Any] = {}
        self._rows = 0

    def __enter__(self) -> NpyWriter:
        return self

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows. Raises ValueError if their shape differs from that of the first rows."""
        if self._file is None:
            self._header = np.lib.format.header_data_from_array_1_0(rows) | {"fortran_order": False}
            self._file = self._path.open("wb")
            self._write_header()
        shape = tuple(self._header["shape"][1:])
        if rows.shape[1:] != shape:
            raise ValueError(f"samples have shape {rows.shape[1:]}; expected {shape}, like the samples before")
        if len(rows):
            self._file.write(np.ascontiguousarray(rows).data)
        self._rows += len(rows)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._write_header()  # numpy reserves space in it for a larger number of rows
            self._file.close()

    def _write_header(self) -> None:
        assert self._file is not None
        shape = (self._rows, *self._header["shape"][1:])
        np.lib.format.write_array_header_1_0(self._file, self._header | {"shape": shape})
