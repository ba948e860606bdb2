"""The store: the cache of decoded data sets, the `shoal data` commands and the partition plot."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from file_server import MD5, Server, names
from shoal.data import store
from shoal.data.decoded import cache_folder, is_decoded, load_decoded
from shoal.data.plots import draw_partition
from shoal.data.publishers import PUBLISHERS, Publisher
from shoal.errors import DataError

pytestmark = pytest.mark.usefixtures("data_folders")


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
