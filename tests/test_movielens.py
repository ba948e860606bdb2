"""MovieLens: ratings by user, renumbered without gaps, a fixed part of each user's ratings as test samples."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from shoal.data.decoded import is_decoded
from shoal.data.movielens import Movielens
from shoal.errors import DataError
from shoal.experiment import Experiment

REAL = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[2] / "shared" / "data")
HEADER = "userId,movieId,rating,timestamp\r\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the real ratings in SHOAL_DATA. The test is skipped if they are missing."""
    if not (REAL / "movielens" / "ml-latest-small.zip").is_file():
        pytest.skip(f"no movielens/ml-latest-small.zip in {REAL}: set SHOAL_DATA to where data sets lie")
    monkeypatch.setenv("SHOAL_DATA", str(REAL))


def table(folder: Path, *lines: str, header: str = HEADER) -> Path:
    file = folder / "ratings.csv"
    file.write_text(header + "".join(f"{line}\r\n" for line in lines))
    return file


def test_users_and_films_are_numbered_without_gaps_and_samples_are_ordered_by_user(tmp_path: Path) -> None:
    lines = [
        f"{user},{film},{stars},9" for user, film, stars in [(70, 5, 0.5), (3, 900, 5.0), (70, 900, 4.5), (3, 1, 2)]
    ]
    data = Movielens(path=table(tmp_path, *lines), test_fraction=0.5).load(seed=0)
    assert (data.task, data.classes, data.sizes, data.shape) == ("regression", 1, (2, 3), (2,))
    assert (data.train.x.dtype, data.train.y.dtype) == (np.int32, np.float32)
    rows = {
        (*pair, stars) for s in (data.train, data.test) for pair, stars in zip(s.x.tolist(), s.y.tolist(), strict=True)
    }
    assert {(int(u), int(f), y) for (u, f), y in ((r[:2], r[2]) for r in rows)} == {
        (1, 1, 0.5), (0, 2, 5.0), (1, 2, 4.5), (0, 0, 2.0)
    }  # fmt: skip
    assert data.train.owner is not None
    assert data.train.owner.tolist() == data.train.x[:, 0].tolist() == [0, 1]


def test_each_user_keeps_its_share_and_the_split_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    counts = [1, 2, 3, 10, 37]
    lines = [f"{user},{film},3.0,0" for user, count in enumerate(counts) for film in range(count)]
    one, other = (Movielens(path=table(tmp_path, *lines)).load(seed) for seed in (0, 1))
    assert np.array_equal(one.test.x, other.test.x)
    tests = np.bincount(one.test.x[:, 0], minlength=5)
    assert tests.tolist() == [0, 0, 0, 3, 11]  # ⌊0.3·n⌋: every user has something to train on
    assert (tests + np.bincount(one.train.x[:, 0])).tolist() == counts


@pytest.mark.parametrize("packed", [True, False])
def test_the_older_format_is_read_too(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{user}\t{film}\t{1 + (user + film) % 5}\t88125094{film}\n" for user in (1, 2) for film in range(9))
    folder = tmp_path / "movielens"
    folder.mkdir()
    if packed:
        with zipfile.ZipFile(folder / "ml-100k.zip", "w") as archive:
            archive.writestr("ml-100k/README", "…")
            archive.writestr("ml-100k/u.data", text)
    else:
        (folder / "ml-100k").mkdir()
        (folder / "ml-100k" / "u.data").write_text(text)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    data = Movielens(version="ml-100k").load(seed=0)
    assert (len(data.train), len(data.test), data.sizes) == (14, 4, (2, 9))
    with pytest.raises(DataError, match="ml-latest-small"):
        Movielens().load(seed=0)


@pytest.mark.parametrize(
    ("line", "expected_error"),
    [
        ("1,2,5.5,0", "line 3: rating 5.5; expected 0.5 to 5"),
        ("1,2,0,0", "line 3: rating 0; expected"),
        ("1,2,nan,0", "line 3: rating nan"),
        ("1,2,good,0", "line 3: .*'good'.; expected userId, movieId, rating as numbers"),
        ("one,2,3.0,0", "line 3: .'one', .*as numbers"),
        ("1,2", "line 3: 2 columns"),
        ("-1,2,3.0,0", "line 3: user -1"),
    ],
)
def test_errors_name_the_file_and_the_line(line: str, expected_error: str, tmp_path: Path) -> None:
    file = table(tmp_path, "1,1,4.0,0", line)
    with pytest.raises(DataError, match=expected_error) as caught:
        Movielens(path=file).load(seed=0)
    assert "ratings.csv" in str(caught.value)


def test_the_older_format_has_whole_stars_from_one(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t1\t0.5\t0\n")
    with pytest.raises(DataError, match=r"u\.data: line 1: rating 0\.5; expected 1 to 5"):
        Movielens(version="ml-100k", path=tmp_path / "u.data").load(seed=0)


def test_a_version_reads_its_own_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    (tmp_path / "movielens").mkdir()
    file = table(tmp_path / "movielens", *(f"1,{film},4.5,0" for film in range(10)))
    assert len(Movielens().load(seed=0).train) == 7
    with pytest.raises(DataError, match=r"ml-100k\.zip is not in .*shoal data fetch movielens-100k'"):
        Movielens(version="ml-100k").load(seed=0)
    with pytest.raises(DataError, match=r"a file of ml-latest-small; expected u\.data"):
        Movielens(version="ml-100k", path=file).load(seed=0)
    assert is_decoded("movielens")
    assert not is_decoded("movielens-100k")
    (tmp_path / "movielens" / "u.data").write_text("".join(f"1\t{film}\t4\t0\n" for film in range(10)))
    Movielens(version="ml-100k").load(seed=0)
    assert is_decoded("movielens-100k")


def test_ratings_that_leave_no_test_samples_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"leaves the test set empty: no user has more than 1 ratings"):
        Movielens(path=table(tmp_path, "1,1,4.0,0", "2,2,4.0,0")).load(seed=0)


def test_files_of_another_format_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: no column rating; expected userId, movieId, rating"):
        Movielens(path=table(tmp_path, header="userId,movieId,stars\n")).load(seed=0)
    with pytest.raises(DataError, match="it has no ratings"):
        Movielens(path=table(tmp_path)).load(seed=0)
    (tmp_path / "ml-latest-small.zip").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(DataError, match=r"ml-latest-small\.zip: not a zip, or incomplete"):
        Movielens(path=tmp_path / "ml-latest-small.zip").load(seed=0)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("films.csv", "")
    with pytest.raises(DataError, match=r"no ratings\.csv in it"):
        Movielens(path=tmp_path / "other.zip").load(seed=0)


@pytest.mark.usefixtures("real")
def test_the_real_ratings() -> None:
    data = Movielens().load(seed=0)
    assert (len(data.train) + len(data.test), data.sizes) == (100_836, (610, 9_724))
    assert len(data.train) == 70_856
    assert (data.train.y.min(), data.train.y.max()) == (0.5, 5.0)
    shares = np.bincount(data.test.x[:, 0]) / np.bincount(np.concatenate([data.train.x[:, 0], data.test.x[:, 0]]))
    assert 0.25 < shares.min() <= shares.max() <= 0.3


@pytest.mark.usefixtures("real")
def test_the_real_ratings_give_the_same_models_on_both_engines(tmp_path: Path) -> None:
    simulated, processes = (
        Experiment(
            nodes=3, seed=1, engine=engine, algorithm={"name": "dpsgd", "rounds": 2}, topology={"name": "ring"},
            dataset={"name": "movielens"}, partition={"name": "natural", "order": "contiguous"},
            model={"name": "matrix-factorization"}, evaluation={"every": 0, "samples": 500},
            training={"lr": 1.0, "loss": "rmse", "local_steps": 4}, simulation={"batching": "off"},
        ).run(tmp_path)
        for engine in ("simulation", "processes")
    )  # fmt: skip
    assert simulated.status == processes.status == "completed"
    assert simulated.summary["digest"] == processes.summary["digest"]
    assert simulated.summary["loss"]["mean"] == processes.summary["loss"]["mean"] < 4
