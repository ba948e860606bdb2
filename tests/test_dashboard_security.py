"""What the server of the page rejects: files outside of the runs, unknown hosts, requests without the token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dashboard_runs import WrittenRun
from dashboard_server import CLIENT, served
from shoal.dashboard.guard import is_loopback
from shoal.dashboard.runs import EXPERIMENT_BYTES, Runs
from shoal.dashboard.serving import bind
from shoal.errors import DataError

TOKEN = "a-token-for-tests"
SECRET = "the text of a file outside"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of runs with one run, beside a secret file and another run."""
    (tmp_path / "secret.txt").write_text(SECRET)
    WrittenRun(tmp_path / "outside", "outside").finish()
    WrittenRun(tmp_path / "runs" / "inside", "inside").finish()
    return tmp_path / "runs"


@pytest.fixture
def page(root: Path) -> Iterator[str]:
    with served(root) as url:
        yield url


# Files


@pytest.mark.parametrize(
    "id",
    [
        "../outside/20260101-120000-abcdef",
        "inside/../../outside/20260101-120000-abcdef",
        "..",
        "",
        "inside",
        "/",
        "\0",
        "inside/20260101-120000-abcdef/nodes",
        "inside/20260101-120000-abcdef/",
    ],
)
def test_only_runs_of_the_folder_have_an_id(root: Path, page: str, id: str) -> None:
    with pytest.raises(DataError, match="there is no run"):
        Runs(root).find(id)
    for name in ("details", "layout", "state", "node", "timeline"):
        query = {"run": id, "at": 0, "node": 0, "start": 0, "end": 1, "first": 0, "count": 1, "bins": 9}
        response = CLIENT.get(f"{page}/api/{name}", params=query)
        assert (response.status_code, "there is no run" in response.json()["error"]) == (404, True)


def test_an_absolute_id_is_no_run(root: Path) -> None:
    with pytest.raises(DataError):
        Runs(root).find(str(root.parent / "outside" / "20260101-120000-abcdef"))


def test_links_to_runs_outside_are_not_followed(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside", target_is_directory=True)
    (root / "inside" / "link").symlink_to(root.parent / "outside" / "20260101-120000-abcdef")
    assert [info.name for info in Runs(root).all()] == ["inside"]


def test_a_run_that_is_replaced_by_a_link_is_not_read(root: Path) -> None:
    runs = Runs(root)
    [info] = runs.all()
    path = runs.find(info.id).path
    path.rename(root.parent / "moved")
    path.symlink_to(root.parent / "outside" / "20260101-120000-abcdef", target_is_directory=True)
    with pytest.raises(DataError):
        runs.find(info.id)


@pytest.mark.parametrize("name", ["summary.json", "experiment.toml", "data.json", "nodes/0.jsonl", "nodes"])
def test_links_inside_a_run_are_not_followed(root: Path, page: str, name: str) -> None:
    folder = root / "inside" / "20260101-120000-abcdef"
    path = folder / name
    if path.is_dir():
        path.rename(folder / "moved")
        path.symlink_to(root.parent / "outside" / "20260101-120000-abcdef" / "nodes")
    else:
        path.unlink(missing_ok=True)
        path.symlink_to(root.parent / "secret.txt")
    query = {"run": "inside/20260101-120000-abcdef", "node": 0}
    texts = [CLIENT.get(f"{page}/api/{api}", params=query).text for api in ("details", "node", "layout", "runs")]
    assert SECRET not in "".join(texts)
    if name.startswith("nodes"):
        assert "has no records" in texts[1]
    if name == "data.json":
        assert '"data":null' in texts[1]


@pytest.mark.parametrize("name", ["experiment.toml", "nodes/0.jsonl"])
def test_a_named_pipe_does_not_stop_the_server(root: Path, page: str, name: str) -> None:
    path = root / "inside" / "20260101-120000-abcdef" / name
    path.unlink()
    os.mkfifo(path)
    query = {"run": "inside/20260101-120000-abcdef", "node": 0}
    for api in ("runs", "details", "node", "layout"):
        assert CLIENT.get(f"{page}/api/{api}", params=query).status_code in (200, 404)


def test_a_huge_file_of_records_does_not_stop_the_server(root: Path, page: str) -> None:
    with (root / "inside" / "20260101-120000-abcdef" / "nodes" / "0.jsonl").open("ab") as file:
        file.truncate(200 * 2**30)
    query = {"run": "inside/20260101-120000-abcdef", "node": 0}
    for api in ("node", "layout", "runs"):
        assert CLIENT.get(f"{page}/api/{api}", params=query).status_code == 200


def test_a_folder_whose_name_is_not_utf_8_is_left_out(root: Path, page: str) -> None:
    WrittenRun(root / os.fsdecode(b"\xff"), "hidden").finish()
    assert [run["name"] for run in CLIENT.get(f"{page}/api/runs").json()] == ["inside"]


def test_a_file_that_is_too_large_is_damaged(root: Path) -> None:
    with (root / "inside" / "20260101-120000-abcdef" / "experiment.toml").open("ab") as file:
        file.truncate(EXPERIMENT_BYTES + 1)
    [info] = Runs(root).all()
    assert info.status == "damaged"
    assert "expected at most" in info.problem


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "//etc/passwd"]
)
def test_static_files_are_those_of_the_page(page: str, path: str) -> None:
    assert CLIENT.get(f"{page}{path}").status_code == 404


@pytest.mark.parametrize("query", ["at=nan", "at=", "at=1e999", ""])
def test_wrong_parameters_are_reported(page: str, query: str) -> None:
    response = CLIENT.get(f"{page}/api/state?run=inside/20260101-120000-abcdef&{query}")
    assert (response.status_code, response.json()["error"][:2]) == (404, "at")


# Hosts, methods and headers


def test_a_request_must_name_this_machine(page: str) -> None:
    port = page.rsplit(":", 1)[1]
    statuses = {
        host: CLIENT.get(f"{page}/api/runs", headers={"Host": host}).status_code
        for host in (
            f"localhost:{port}",
            f"127.0.0.1:{port}",
            "[::1]",
            "LOCALHOST",
            "attacker.example",
            f"a.b:{port}",
            "",
        )
    }
    assert [host for host, status in statuses.items() if status != 200] == ["attacker.example", f"a.b:{port}", ""]
    assert statuses["attacker.example"] == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_server_only_reads(page: str, method: str) -> None:
    assert CLIENT.request(method, f"{page}/api/runs").status_code == 405


def test_the_page_runs_no_foreign_or_inline_script(page: str) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/missing"):
        headers = CLIENT.get(page + path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in CLIENT.get(page).text


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    for path in ("/", "/static/app.css"):
        assert "http" not in CLIENT.get(page + path).text


# The token


def test_other_hosts_than_this_machine_get_a_token() -> None:
    for host, needs_token in (("127.0.0.1", False), ("0.0.0.0", True)):
        address = bind(host, 0)
        address.socket.close()
        assert (address.token is not None) == needs_token
    assert [
        is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "0.0.0.0", "10.0.0.1", "x")
    ] == [
        *[True] * 4,
        *[False] * 3,
    ]


def test_a_token_is_needed_for_everything(root: Path) -> None:
    with served(root, TOKEN) as url:
        for path in ("/", "/static/app.js", "/api/runs", "/api/stream"):
            assert CLIENT.get(url + path).status_code == 401
            assert CLIENT.get(f"{url}{path}?token=wrong").status_code == 401
        assert CLIENT.get(f"{url}/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        for wrong in ("", "Bearer", "Bearer x", "Bearer é"):
            assert CLIENT.get(f"{url}/api/runs", headers={"Authorization": wrong.encode()}).status_code == 401


def test_the_token_of_the_address_becomes_a_cookie(root: Path) -> None:
    with served(root, TOKEN) as url, httpx.Client(verify=False) as browser:
        response = browser.get(f"{url}/?token={TOKEN}&a=1")
        assert (response.status_code, response.headers["location"]) == (303, "/?a=1")
        cookie = response.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert browser.get(f"{url}/api/runs").status_code == 200
        assert browser.get(f"{url}//attacker.example?token={TOKEN}").headers["location"] == "/attacker.example"
