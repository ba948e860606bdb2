"""LEAF's data sets are read unchanged, and errors name the file and position."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.format import open_memmap

from shoal.data.leaf import Celeba, Femnist, LeafSynthetic, Reddit, Sent140, Shakespeare
from shoal.data.npy_writer import NpyWriter
from shoal.errors import DataError
from shoal.experiment import Experiment

REAL = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[2] / "shared" / "data")
ALPHABET = Shakespeare.ALPHABET


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture
def real(cache: Path, real_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Folders of real data, decoded once for all tests. Tests are skipped if the data are missing."""

    def folder(name: str) -> Path:
        if not (REAL / name / "train").is_dir():
            pytest.skip(f"no {name} in {REAL}: set SHOAL_DATA to where data sets lie")
        monkeypatch.setenv("SHOAL_CACHE", str(real_cache))
        monkeypatch.setenv("SHOAL_DATA", str(REAL))
        return REAL / name

    return folder


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write users and their samples in LEAF's format: one file for each mapping of a split."""

    def written(
        train: list[dict[str, Any]],
        test: list[dict[str, Any]],
        counts: dict[str, int] | None = None,
        pack: bool = False,
    ) -> Path:
        for split, files in (("train", train), ("test", test)):
            (tmp_path / "leaf" / split).mkdir(parents=True, exist_ok=True)
            for number, users in enumerate(files):
                held = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
                claimed = [(counts or {}).get(user, len(y)) for user, (_, y) in users.items()]
                text = json.dumps({"users": list(held), "num_samples": claimed, "user_data": held}).encode()
                file = tmp_path / "leaf" / split / f"all_data_{number}.json"
                if pack:
                    file.with_suffix(".json.gz").write_bytes(gzip.compress(text))
                else:
                    file.write_bytes(text)
        return tmp_path / "leaf"

    return written


def vectors(count: int, label: int = 0, size: int = 3, start: float = 0.0) -> tuple[list[Any], list[Any]]:
    return [[start + i + j / 8 for j in range(size)] for i in range(count)], [label] * count


def test_users_are_numbered_by_first_appearance_across_files(write: Write) -> None:
    path = write([{"zoe": vectors(2), "al": vectors(1, 1)}, {"bo": vectors(1), "zoe": vectors(3, 1, start=50)}],
                 [{"bo": vectors(1), "zoe": vectors(2)}])  # fmt: skip
    data = LeafSynthetic(path).load(seed=0)
    assert data.train.owner is not None
    assert data.test.owner is not None
    assert data.train.owner.tolist() == [0, 0, 1, 2, 0, 0, 0]
    assert data.test.owner.tolist() == [2, 0, 0]
    assert data.train.y.tolist() == [0, 0, 1, 0, 1, 1, 1]
    assert data.train.x[4].tolist() == [50.0, 50.125, 50.25]
    assert (data.classes, data.shape, data.train.x.dtype, data.train.y.dtype) == (2, (3,), np.float32, np.int64)


def test_inconsistencies_of_leafs_scripts_give_one_warning_per_load(write: Write) -> None:
    path = write([{"a": vectors(2), "none": vectors(0), "b": vectors(3, 4)}], [{"new": vectors(4), "a": vectors(1)}],
                 {"a": 81, "b": 3})  # fmt: skip
    for _ in range(2):  # first decoded, then read from the cache
        with pytest.warns(
            UserWarning, match="num_samples is wrong for 2 users: it declares 162 samples, and the files hold 3;"
        ) as caught:
            data = LeafSynthetic(path).load(seed=0)
        assert len(caught) == 1
        warning = str(caught[0].message)
        assert "1 users have no samples in a file" in warning
        assert "1 test users have no training data" in warning
    assert data.test.owner is not None
    assert data.test.owner.tolist() == [2, 2, 2, 2, 0]
    assert (len(data.train), data.classes) == (5, 5)


def test_listed_users_without_data_give_a_warning(write: Write) -> None:
    path = write([{"a": vectors(2)}], [{"a": vectors(1)}])
    file = path / "train" / "all_data_0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"users": ["absent", "a"], "num_samples": [5, 2]}))
    with pytest.warns(
        UserWarning, match="num_samples is wrong for 1 users: it declares 5 samples, and the files hold 0;"
    ):
        assert len(LeafSynthetic(path).load(seed=0).train) == 2


def test_gzipped_files_and_leafs_own_folders_are_found(write: Write, tmp_path: Path) -> None:
    path = write([{"a": vectors(2)}], [{"a": vectors(1)}], pack=True)
    repository = tmp_path / "leaf-repository"
    repository.mkdir()
    path.rename(repository / "data")
    assert len(LeafSynthetic(repository).load(seed=0).train) == 2


def test_decoded_data_are_memory_mapped_and_never_stored_beside_the_source(write: Write, cache: Path) -> None:
    path = write([{"a": vectors(2)}], [{"a": vectors(1)}])
    before = sorted(path.rglob("*"))
    data = LeafSynthetic(path).load(seed=0)
    assert sorted(path.rglob("*")) == before
    assert isinstance(data.train.x.base, np.memmap)
    assert len(list(cache.glob("decoded/*/x_train.npy"))) == 1


BROKEN: dict[str, tuple[Any, str]] = {
    "targets missing": ({"a": ([[1.0]], [])}, "user 'a': 1 inputs and 0 targets"),
    "label outside": ({"a": ([[1.0], [2.0]], [0, 7])}, "user 'a': the label of sample 1 is 7; expected .* 0 and 4"),
    "label negative": ({"a": ([[1.0]], [-1])}, "label of sample 0 is -1"),
    "label text": ({"a": ([[1.0]], ["x"])}, "label of sample 0 is 'x'"),
    "ragged": ({"a": ([[1.0, 2.0], [1.0]], [0, 0])}, "sample 1 is 1 values; expected a list of 2"),
    "other length": ({"a": ([[1.0, 2.0]], [0]), "b": ([[1.0]], [0])}, r"user 'b': .*shape \(1,\); expected \(2,\)"),
    "not numbers": ({"a": ([["u"]], [0])}, "contains 'u'; expected numbers"),
    "infinite": ({"a": ([[1e300]], [0])}, "finite"),
    "no users": ({}, "no user in 'user_data'"),
    "all empty": ({"a": ([], [])}, "no samples in 1 files"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore:overflow")
def test_errors_name_file_user_and_sample(name: str, write: Write, cache: Path) -> None:
    users, expected_error = BROKEN[name]
    path = write([users], [{"a": ([[1.0, 2.0]], [0])}])
    with pytest.raises(DataError, match=expected_error) as caught:
        LeafSynthetic(path, classes=5).load(seed=0)
    assert str(path / "train") in str(caught.value)
    assert not list(cache.glob("decoded/*"))  # never half-written


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b'{"users": [], "num_samples": [], "user_data": {"a": {"x": [1,,2]}}}', "at byte 61: unallowed token"),
        (b'{"user_data": {"a": {"x": [[1.0, 2', "at byte 34: premature EOF"),
        (b'{"user_data": {"a": {"x": [[1.0]], "y": [0]}}} and more', "at byte 47: "),
        (b" " * 200_000 + b'{"user_data": [malformed]}', "at byte 200,0"),
        (b"", "at byte 0: premature EOF"),
        (b'{"users": ["\xff"], "user_data": {}}', "at byte 12: invalid bytes in UTF8 string"),
        (b'{"user_data": {"a": [1]}}', "user 'a': expected"),
        (b'["users"]', "no user in 'user_data'"),
        (b'{"user_data": ' + b"[" * 20, "byte 29: lists are nested more than 16 deep"),
    ],
)
def test_errors_of_malformed_json_name_the_position(text: bytes, place: str, write: Write) -> None:
    path = write([{"a": vectors(1)}], [{"a": vectors(1)}])
    (path / "train" / "all_data_0.json").write_bytes(text)
    with pytest.raises(DataError, match=place) as caught:
        LeafSynthetic(path).load(seed=0)
    assert "all_data_0.json" in str(caught.value)


def test_a_truncated_gzip_is_an_error(write: Write) -> None:
    path = write([{"a": vectors(100)}], [{"a": vectors(1)}], pack=True)
    file = path / "train" / "all_data_0.json.gz"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"all_data_0.json.gz: cannot be read: .*incomplete"):
        LeafSynthetic(path).load(seed=0)


def test_the_error_of_missing_data_names_the_searched_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    with pytest.raises(DataError, match="femnist"):
        Femnist().load(seed=0)
    (tmp_path / "shakespeare" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no \.json or \.json\.gz file"):
        Shakespeare().load(seed=0)


def test_femnist_is_images_of_28_by_28(write: Write) -> None:
    x = np.random.default_rng(0).random((3, 784)).round(6)
    path = write([{"a": (x.tolist(), [0, 61, 5])}], [{"a": (x[:1].tolist(), [1])}])
    data = Femnist(path).load(seed=0)
    assert data.shape == (1, 28, 28)
    assert data.classes == 62
    assert np.array_equal(data.train.x.reshape(3, -1), x.astype(np.float32))
    with pytest.raises(DataError, match=r"label of sample 1 is 61; expected .* 9"):
        Femnist(path, classes=10).load(seed=0)


def test_celeba_reads_resizes_and_counts_images(write: Write) -> None:
    from PIL import Image

    path = write([{"7": (["1.png", "2.png"], [0, 1])}], [{"7": (["1.png"], [1])}])
    with pytest.raises(DataError, match="no folder of images"):
        Celeba(path).load(seed=0)
    images = path / "raw" / "img_align_celeba"
    images.mkdir(parents=True)
    Image.new("RGB", (178, 218), (255, 0, 10)).save(images / "1.png")
    with pytest.raises(DataError, match=r"user '7': the image of sample 1, .*2\.png, is missing"):
        Celeba(path).load(seed=0)
    with pytest.warns(UserWarning, match="1 images are missing"):
        data = Celeba(path, missing="skip").load(seed=0)
    assert (data.shape, data.train.x.dtype, len(data.train), len(data.test)) == ((3, 84, 84), np.uint8, 1, 1)
    assert data.train.x[0, :, 40, 40].tolist() == [255, 0, 10]
    assert data.scaling is not None
    (images / "2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2\.png, cannot be read"):
        Celeba(path).load(seed=0)
    with pytest.raises(DataError, match="expected the name of an image"):
        Celeba(write([{"7": (["../1.png"], [0])}], [{"7": (["1.png"], [1])}])).load(seed=0)


def test_shakespeare_numbers_characters_as_leaf_does(write: Write) -> None:
    text = ALPHABET[:40] * 2
    path = write([{"HAMLET": ([text, "é" * 80], ["}", "a"])}], [{"HAMLET": ([text], ["\n"])}])
    with pytest.warns(UserWarning, match="80 characters are not in the alphabet"):
        data = Shakespeare(path).load(seed=0)
    assert (data.classes, data.sizes, data.shape, data.train.x.dtype) == (80, (80,), (80,), np.uint8)
    assert data.train.x[0].tolist() == [*range(40), *range(40)]
    assert set(data.train.x[1].tolist()) == {79}
    assert data.train.y.tolist() == [79, ALPHABET.index("a")]
    with pytest.raises(DataError, match="sample 0 is 'too short'; expected a string of 80"):
        Shakespeare(write([{"a": (["too short"], ["x"])}], [{"a": ([text], ["x"])}])).load(seed=0)
    with pytest.raises(DataError, match="target of sample 0 is 'xy'; expected one character"):
        Shakespeare(write([{"a": ([text], ["xy"])}], [{"a": ([text], ["x"])}])).load(seed=0)


def tweet(text: str) -> list[str]:
    return ["1", "Mon", "NO_QUERY", "someone", text, "training"]


def test_sent140_numbers_the_most_frequent_words_of_the_training_data(write: Write, tmp_path: Path) -> None:
    happy, sad = tweet("good, good day"), tweet("bad day unseen")
    path = write([{"u": ([happy, happy], [4, "4"])}], [{"u": ([sad], [0])}])
    data = Sent140(path, vocabulary=3, length=5).load(seed=0)
    assert data.sizes == (4,)  # good, "," and day, and any other
    assert data.train.x[0].tolist() == [0, 1, 0, 2, 3]
    assert data.test.x[0].tolist() == [3, 2, 3, 3, 3]
    assert (data.train.y.tolist(), data.test.y.tolist(), data.classes) == ([1, 1], [0], 2)
    (tmp_path / "glove.txt").write_text("bad 0.1 0.2\nday 0.3 0.4\n")
    given = Sent140(path, words=tmp_path / "glove.txt").load(seed=0)
    assert given.shape == (25,)
    assert given.test.x[0, :4].tolist() == [0, 1, 2, 2]
    with pytest.raises(DataError, match="label of sample 0 is 2"):
        Sent140(write([{"u": ([sad], [2])}], [{"u": ([sad], [0])}])).load(seed=0)
    with pytest.raises(DataError, match=r"user 'u': sample 0 is 3; expected \[id"):
        Sent140(write([{"u": ([3], [0])}], [{"u": ([sad], [0])}])).load(seed=0)


def test_a_label_below_zero_is_rejected_if_the_number_of_classes_is_unknown(write: Write) -> None:
    path = write([{"u": ([[1.0]], [-1])}], [{"u": ([[1.0]], [0])}])
    with pytest.raises(DataError, match="label of sample 0 is -1; expected an integer of at least 0"):
        LeafSynthetic(path).load(seed=0)


def comment(*words: str) -> tuple[list[list[str]], dict[str, Any]]:
    """A comment as LEAF's preprocess.py creates it, in sequences of 4."""
    tokens, following = ["<BOS>", *words, "<EOS>"], [*words, "<EOS>", "<PAD>"]
    counts = [1.0] * len(tokens)
    fill = -len(tokens) % 4
    tokens, following, counts = tokens + ["<PAD>"] * fill, following + ["<PAD>"] * fill, counts + [0.0] * fill

    def cut(tokens: list[Any]) -> list[Any]:
        return [tokens[i : i + 4] for i in range(0, len(tokens), 4)]

    return cut(tokens), {"subreddit": "s", "target_tokens": cut(following), "count_tokens": cut(counts)}


def test_reddit_is_sequences_with_ignored_padding(write: Write, tmp_path: Path) -> None:
    x, y = zip(comment("a", "b", "a"), comment("a"), strict=True)
    path = write([{"9": (list(x), list(y))}], [{"9": ([x[0]], [y[0]])}])
    data = Reddit(path).load(seed=0)
    assert (data.task, data.padding, data.classes, data.shape) == ("sequence", 0, 6, (4,))
    # <PAD> 0, <UNK> 1, a 2, <BOS> 3, <EOS> 4, b 5
    assert data.train.x.tolist() == [[3, 2, 5, 2], [4, 0, 0, 0], [3, 2, 4, 0]]
    assert data.train.y.tolist() == [[2, 5, 2, 4], [0, 0, 0, 0], [2, 4, 0, 0]]
    assert data.train.owner is not None
    assert data.train.owner.tolist() == [0, 0, 0]
    assert Reddit(path, vocabulary=3).load(seed=0).test.x.tolist() == [[1, 2, 1, 2], [1, 0, 0, 0]]
    (tmp_path / "vocab.json").write_text(json.dumps({"vocab": {"<PAD>": 0, "<UNK>": 1, "b": 7}, "size": 8}))
    given = Reddit(path, vocab=tmp_path / "vocab.json").load(seed=0)
    assert (given.classes, given.train.x[0].tolist()) == (8, [1, 1, 7, 1])
    (tmp_path / "reddit_vocab.pck").write_bytes(b"cos\nsystem\n.")
    with pytest.raises(DataError, match="pickles are not read"):
        Reddit(path, vocab=tmp_path / "reddit_vocab.pck").load(seed=0)
    y[1]["target_tokens"] = [["a"]]
    with pytest.raises(DataError, match="user '9': sample 1: tokens, target_tokens and count_tokens differ"):
        Reddit(write([{"9": (list(x), list(y))}], [{"9": ([x[0]], [y[0]])}])).load(seed=0)
    with pytest.raises(DataError, match="sample 0 has no target_tokens"):
        Reddit(write([{"9": ([x[0]], [{}])}], [{"9": ([x[0]], [y[0]])}])).load(seed=0)


def test_an_array_may_grow_to_any_length(tmp_path: Path) -> None:
    rows = np.arange(2_000_000, dtype=np.int32).reshape(-1, 2)
    with NpyWriter(tmp_path / "a.npy") as writer:
        for start in range(0, len(rows), 300_000):
            writer.append(rows[start : start + 300_000])
    assert np.array_equal(np.load(tmp_path / "a.npy"), rows)
    assert open_memmap(tmp_path / "a.npy", mode="r").shape == rows.shape


def test_real_femnist_digits(real: Callable[[str], Path]) -> None:
    data = Femnist(real("femnist-digits"), classes=10).load(seed=0)
    assert data.train.owner is not None
    assert (len(data.train), len(data.test), data.train.owner.max() + 1) == (5405, 592, 12)
    assert (data.train.x.min(), data.train.x.max()) == (0.0, 1.0)
    assert set(data.train.y.tolist()) == set(range(10))


def test_real_shakespeare_trusts_the_data_and_not_the_counts(real: Callable[[str], Path]) -> None:
    path = real("shakespeare")
    with pytest.warns(UserWarning, match="wrong for 43 users: it declares 41,785 samples, and the files hold 38,388;"):
        data = Shakespeare(path).load(seed=0)
    assert data.train.owner is not None
    assert (len(data.train), len(data.test), data.train.owner.max() + 1) == (167_068, 38_388, 43)
    text = "".join(ALPHABET[i] for i in data.test.x[0])
    assert text == "his bad verses, tear him for his bad verses. It is no matter, his name's Cinna. "
    assert ALPHABET[data.test.y[0]] == "P"


@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        ({"name": "femnist", "folder": "femnist-digits", "classes": 10}, {"name": "leaf-cnn"}),
        ({"name": "shakespeare"}, {"name": "lstm", "hidden": 8, "layers": 1}),
    ],
    ids=["femnist", "shakespeare"],
)
@pytest.mark.filterwarnings("ignore:dataset 'shakespeare'")
def test_real_users_give_the_same_models_on_both_engines(
    dataset: dict[str, Any], model: dict[str, Any], tmp_path: Path, real: Callable[[str], Path]
) -> None:
    real(dataset.get("folder", dataset["name"]))
    simulated, processes = (
        Experiment(
            nodes=3, seed=1, engine=engine, algorithm={"name": "dpsgd", "rounds": 1}, topology={"name": "ring"},
            dataset=dataset, partition={"name": "natural"}, model=model,
            evaluation={"every": 0, "samples": 20, "average": False},
            training={"lr": 0.1, "local_steps": 1, "batch_size": 2}, simulation={"batching": "off"},
        ).run(tmp_path)
        for engine in ("simulation", "processes")
    )  # fmt: skip
    assert simulated.status == processes.status == "completed"
    assert simulated.summary["digest"] == processes.summary["digest"]
    assert simulated.summary["accuracy"] == processes.summary["accuracy"]
