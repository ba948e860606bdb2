"""The cost of the page: the server's share of a processor core while a large run goes on, and frames of the graph.

    python benchmarks/dashboard.py                    # both, with 1,024 nodes
    python benchmarks/dashboard.py --frames --nodes 1000

The run is written by this program: every node finishes `--rate` rounds per second and sends to 5 other nodes in each
round. The frames are counted while the camera of the graph moves, in headless Chromium without a graphics card
(SwiftShader), with a window of 1280 × 900 pixels.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from dashboard_runs import WrittenRun  # the writer of runs that tests use

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"),
]
MOVE = """async (seconds) => {
  const view = document.querySelector(".graph").graphView;
  const { width, height } = view.renderer.canvas;
  const times = [];
  const start = performance.now();
  while (performance.now() - start < seconds * 1000) {
    const t = (performance.now() - start) / 1000;
    const scale = 0.45 * Math.min(width, height) * (1 + 0.4 * Math.sin(t));
    view.moveTo({ scale, x: width / 2 + 60 * Math.sin(1.3 * t), y: height / 2 + 40 * Math.cos(t) });
    times.push(await new Promise(requestAnimationFrame));
  }
  return times;
}"""


@contextlib.contextmanager
def server(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start `shoal serve` as a process."""
    command = [sys.executable, "-u", "-m", "shoal", "serve", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield re.findall(r"http://\S+/", process.stdout.readline())[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def server_share(root: Path, nodes: int, rate: float, seconds: float) -> None:
    """Print the share of a core that the server takes while one page follows a run."""
    run = WrittenRun(root / "live", "live", nodes=nodes, rounds=100_000, degree=5, dynamic=True, evaluate_every=5)
    run.advance(20)
    stop = threading.Event()

    def write() -> None:
        due = time.monotonic()
        while not stop.is_set():
            run.advance()
            due += 1 / rate
            time.sleep(max(0.0, due - time.monotonic()))

    with server(root) as (url, process):
        query = {"run": run.folder.path.relative_to(root).as_posix(), "nodes": "1"}
        with httpx.stream("GET", f"{url}api/stream", params=query, timeout=60) as response:
            chunks = response.iter_lines()
            while not next(chunks).startswith("data: "):
                pass
            writer = threading.Thread(target=write)
            writer.start()
            began, before, first, updates, size = time.monotonic(), process.cpu_times(), run.round, 0, 0
            for line in chunks:
                updates += line.startswith("data: ")
                size += len(line)
                if time.monotonic() - began > seconds:
                    break
            took, after = time.monotonic() - began, process.cpu_times()
            stop.set()
            writer.join()
    share = (after.user + after.system - before.user - before.system) / took
    print(f"{nodes} nodes, {(run.round - first) / took:.2f} rounds/s: {100 * share:.1f} % of a core, "
          f"{updates / took:.2f} updates/s, {size / max(updates, 1) / 1000:.0f} kB each")  # fmt: skip


def frame_rate(root: Path, nodes: int, seconds: float) -> None:
    """Print the frames per second of the graph while the camera moves, and while a replay plays."""
    from playwright.sync_api import sync_playwright

    run = WrittenRun(root / "graph", "graph", nodes=nodes, rounds=20, degree=5, dynamic=True)
    run.finish()
    id = run.folder.path.relative_to(root).as_posix().replace("/", "%2F")
    with server(root) as (url, _), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}#/run/{id}/graph")
        page.wait_for_selector(f"text={nodes:,} nodes")
        page.wait_for_timeout(2000)
        renderer = page.locator(".graph").get_attribute("data-renderer")
        edges = page.locator(".counts").inner_text()
        for what in ("moving", "moving during a replay"):
            if what != "moving":
                page.get_by_role("button", name="Play").click()
            processes = psutil.Process().children(recursive=True)
            before = sum(_cpu(process) for process in processes)
            times = page.evaluate(MOVE, seconds)
            used = sum(_cpu(process) for process in processes) - before
            gaps = sorted(b - a for a, b in itertools.pairwise(times))
            print(f"{edges}, {renderer}, {what}: {1000 * (len(times) - 1) / (times[-1] - times[0]):.1f} frames/s, "
                  f"95 % of the frames within {gaps[int(0.95 * len(gaps))]:.0f} ms; "
                  f"{1000 * used / len(times):.1f} ms of processor time per frame")  # fmt: skip
        browser.close()


def _cpu(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2.0, help="rounds per second of each node")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--server", action="store_true", help="only the server")
    parser.add_argument("--frames", action="store_true", help="only the frames")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not parsed.frames:
            server_share(Path(folder) / "share", parsed.nodes, parsed.rate, parsed.seconds)
        if not parsed.server:
            frame_rate(Path(folder) / "frames", parsed.nodes, parsed.seconds / 2)


if __name__ == "__main__":
    main()
