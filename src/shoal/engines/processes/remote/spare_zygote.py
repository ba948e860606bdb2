"""A zygote that an idle agent starts in advance, so that the next run does not wait for its imports."""

from __future__ import annotations

from shoal.engines.processes.zygote_process import ZygoteProcess


class SpareZygote:
    """At most one zygote that belongs to no run yet."""

    def __init__(self) -> None:
        self._zygote: ZygoteProcess | None = None
        self._failed = False

    def start(self) -> None:
        """Start the zygote if there is none. If that is impossible, the next run tries again, and reports the error."""
        if self._zygote is None and not self._failed:
            try:
                self._zygote = ZygoteProcess()
            except OSError:
                self._failed = True

    def take(self) -> ZygoteProcess | None:
        """Return the zygote, which now belongs to the caller; None if there is none."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None and not zygote.is_running:
            zygote.close()
            return None
        return zygote

    def close(self) -> None:
        if (zygote := self.take()) is not None:
            zygote.close()
