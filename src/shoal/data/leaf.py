"""LEAF: a benchmark for federated settings, with samples by user.

Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings". Its scripts write each of six data sets as JSON, in
several files a split:

    <folder>/train/*.json, <folder>/test/*.json     (.json.gz too; and below <folder>/data, as LEAF's scripts leave it)
    {"users": […], "num_samples": […], "user_data": {user: {"x": […], "y": […]}}}

Files are streamed: one user at a time is in memory, and what it becomes goes straight into the decoded form. Users
are numbered in the order in which they first appear, training files first, files by name; a test user without training
data is kept, and numbered after those that have some.

What is wrong with a file is an error that names file, user and sample. What LEAF's own scripts leave behind is counted,
and told in one warning: `num_samples` that disagree with the data (the data are right), users with no samples, test
users without training data.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import reprlib
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples, Scaling
from shoal.data.decoded import Arrays, decoded
from shoal.data.growing import Growing
from shoal.data.store import data_folder, located
from shoal.errors import DataError
from shoal.types import Bounds

VERSION = 2
CHUNK = 1 << 16
DEEPEST = 16
"""Lists and objects in one another; LEAF's own files have 8. Each takes little in a file, and much in memory."""
LARGEST = 1 << 28
"""Bytes of JSON that one user has, or a list of users: they are in memory at once."""
VOCABULARY = 1 << 24
"""Numbers that words may have: a model has a row for each."""

Rows: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
Convert: TypeAlias = Callable[[list[Any], list[Any], "Tally"], Rows]
"""Inputs and targets of one user as rows of arrays. Raises `ValueError` that names the sample."""


@dataclass(frozen=True)
class Femnist:
    """LEAF's FEMNIST (2018): handwritten characters of 3,550 writers, 1×28×28 from 0 to 1, 62 classes.

    float32, with the values that the files have. 62 classes are digits, capitals and small letters; give `classes`
    where only the first of them are there.
    """

    path: Path | None = None
    """The folder that holds train and test; `folder` below SHOAL_DATA when not given."""
    folder: str = "femnist"
    classes: Annotated[int, Bounds(at_least=2)] = 62

    def load(self, seed: int) -> Data:
        arrays = _arrays("femnist", self.path or data_folder() / self.folder, _vectors((1, 28, 28), self.classes),
                         key=str(self.classes))  # fmt: skip
        return _data(arrays, self.classes)


@dataclass(frozen=True)
class Celeba:
    """LEAF's CelebA (2018): does a celebrity smile? Faces of 9,343 people, 3×84×84, 2 classes.

    The JSON files hold names of images, which lie in `images` and are resized as LEAF does it.
    """

    path: Path | None = None
    images: Path | None = None
    """The folder of images; img_align_celeba beside train and test, or in raw beside them, when not given."""
    missing: Literal["error", "skip"] = "error"
    """What an image that is not there is: an error, or a sample that is left out, counted and reported."""

    SIDE = 84

    def load(self, seed: int) -> Data:
        folder = _folder("celeba", self.path)
        names = [self.images] if self.images else [
            folder / "img_align_celeba", folder / "raw" / "img_align_celeba", folder.parent / "raw" / "img_align_celeba"
        ]  # fmt: skip
        images = next((name for name in names if name.is_dir()), None)
        if images is None:
            raise DataError(
                f"dataset 'celeba': no folder of images: looked for {', '.join(map(str, names))}; unpack "
                "img_align_celeba.zip there, or give dataset.images"
            )
        convert = functools.partial(_faces, images, self.SIDE, self.missing == "skip")
        arrays = _arrays("celeba", self.path, convert, key=self.missing, sources=[images])
        return _data(arrays, classes=2, scaling=Scaling())


@dataclass(frozen=True)
class Shakespeare:
    """LEAF's Shakespeare (2018): the next character after 80, by 1,129 speaking roles; 80 characters.

    Inputs are the numbers of characters in LEAF's alphabet, (80,) bytes, which a model casts before it looks them up.
    A character that is not in it, counted and reported, is the last, as LEAF's own code has it.
    """

    path: Path | None = None

    ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
    LENGTH = 80

    def load(self, seed: int) -> Data:
        size = len(self.ALPHABET)
        return _data(_arrays("shakespeare", self.path, _characters), size, sizes=(size,))


@dataclass(frozen=True)
class Sent140:
    """LEAF's Sent140 (2018): is a tweet happy or sad? Tweets by 660,120 users as 25 words, 2 classes.

    Words are cut as LEAF cuts them. They are numbered by `words`, or by how often the training data have them, of which
    the first `vocabulary` count. One number more is any other word, and fills up short tweets.
    """

    path: Path | None = None
    words: Path | None = None
    """A GloVe file (a word begins each line), a list of words (one a line), or LEAF's embs.json."""
    vocabulary: Annotated[int, Bounds(at_least=1)] = 10_000
    length: Annotated[int, Bounds(at_least=1)] = 25

    def load(self, seed: int) -> Data:
        given = [] if self.words is None else [self.words]

        def prepare(train: Sequence[Path]) -> tuple[Convert, Arrays]:
            if self.words is not None:
                words = _listed_words(self.words)
            else:
                said = (
                    word for file in train for _, x, _ in _users(file) for tweet in x
                    for word in WORD.findall(_text_of(tweet) or "")
                )  # fmt: skip
                words = _most_frequent(said, self.vocabulary)
            numbers = {word: number for number, word in enumerate(words)}
            return functools.partial(_sentiments, numbers, self.length), {
                "size": np.array(len(words) + 1),
                "words": np.frombuffer("\n".join(words).encode("utf-8", "surrogatepass"), dtype=np.uint8),
            }

        key = f"{self.vocabulary}-{self.length}"
        arrays = _arrays("sent140", self.path, prepare=prepare, key=key, sources=given)
        return _data(arrays, classes=2, sizes=(arrays["size"].item(),))


@dataclass(frozen=True)
class Reddit:
    """LEAF's Reddit (2018): the next word, in comments of 1.66 million users cut into sequences of 10 words.

    LEAF's preprocessed files: a comment is a list of sequences of tokens, with <BOS>, <EOS> and <PAD>, and its target
    has `target_tokens`, the same moved by one. A sample here is one sequence. <PAD> is 0, <UNK>, any other word, is 1.
    A target that is <PAD>, or that `count_tokens` leaves out, does not count.
    """

    path: Path | None = None
    vocab: Path | None = None
    """Words with their numbers as JSON, or one word a line; the most frequent of the training data when not given."""
    vocabulary: Annotated[int, Bounds(at_least=3)] = 10_000
    """How many words count, <PAD> and <UNK> among them."""

    PAD, UNKNOWN = "<PAD>", "<UNK>"

    def load(self, seed: int) -> Data:
        given = [] if self.vocab is None else [self.vocab]

        def prepare(train: Sequence[Path]) -> tuple[Convert, Arrays]:
            if self.vocab is not None:
                numbers = _numbered_words(self.vocab)
            else:
                special = [self.PAD, self.UNKNOWN]
                said = (
                    token for file in train for _, x, _ in _users(file) for comment in x if _is_comment(comment)
                    for sequence in comment for token in sequence if token not in special
                )  # fmt: skip
                words = [*special, *_most_frequent(said, self.vocabulary - len(special))]
                numbers = {word: number for number, word in enumerate(words)}
            size = np.array(max(numbers.values()) + 1)
            return functools.partial(_sequences, numbers), {"size": size, "padding": np.array(numbers[self.PAD])}

        arrays = _arrays("reddit", self.path, prepare=prepare, key=str(self.vocabulary), sources=given)
        size = arrays["size"].item()
        return _data(arrays, size, task="sequence", sizes=(size,), padding=arrays["padding"].item())


@dataclass(frozen=True)
class LeafSynthetic:
    """LEAF's Synthetic (2018): vectors of 60 numbers, whose classes each user tells apart in its own way."""

    path: Path | None = None
    classes: Annotated[int, Bounds(at_least=2)] | None = None
    """5 as LEAF publishes it; as many as the labels of the files show when not given."""

    def load(self, seed: int) -> Data:
        arrays = _arrays("leaf-synthetic", self.path, _vectors(None, self.classes), key=str(self.classes))
        classes = self.classes or 1 + int(max(arrays["y_train"].max(), arrays["y_test"].max()))
        return _data(arrays, max(classes, 2))


# Files and users.


class Tally(Counter[str]):
    """How often something was left out or mended."""


COUNTED = (
    (
        "disagree",
        "num_samples of {disagree:,} users say {said:,} samples, and {held:,} are there: the data are trusted",
    ),
    ("said", ""),
    ("held", ""),
    ("empty", "{empty:,} times a user has no samples and is left out"),
    ("untrained", "{untrained:,} test users have no training data, and are numbered after those that have"),
    ("unknown", "{unknown:,} characters are not in the alphabet, and taken as its last"),
    ("missing", "{missing:,} images are missing, and their samples left out"),
)
"""What is counted, and in which words it is told."""


def _folder(name: str, path: Path | None) -> Path:
    """The folder that holds train and test."""
    train = located(name, ["train", "data/train"], path)
    if not train.is_dir():
        raise DataError(
            f"dataset {_shown(name)}: {train} is a file; expected a folder with LEAF's train and test folders"
        )
    return train.parent


def _files(folder: Path, split: str) -> list[Path]:
    found = sorted([*folder.glob(f"{split}/*.json"), *folder.glob(f"{split}/*.json.gz")])
    if not found:
        raise DataError(f"{folder / split}: no .json or .json.gz file in it; expected LEAF's JSON files")
    return found


def _arrays(
    name: str,
    path: Path | None,
    convert: Convert | None = None,
    prepare: Callable[[Sequence[Path]], tuple[Convert, Arrays]] | None = None,
    key: str = "",
    sources: Sequence[Path] = (),
) -> Arrays:
    """The decoded form of a data set. `key` tells apart what its parameters make of the same files.

    Where a look at all training files has to come first, `prepare` takes it, and gives `convert` and further arrays.
    """
    folder = _folder(name, path)
    files = {split: _files(folder, split) for split in ("train", "test")}
    for source in sources:
        if not source.exists():
            raise DataError(f"dataset {_shown(name)}: there is no {source}")

    def decode(unfinished: Path) -> Arrays:
        tally = Tally()
        numbers: dict[str, int] = {}
        found: Arrays = {}
        converting = convert
        if prepare is not None:
            converting, found = prepare(files["train"])
        assert converting is not None
        for split, of_split in files.items():
            trained = len(numbers)
            owner = _decode_split(of_split, split, unfinished, converting, numbers, tally)
            found[f"owner_{split}"] = owner
            if split == "test":
                tally["untrained"] = len(numbers) - trained
        found["counts"] = np.array([tally[what] for what, _ in COUNTED], dtype=np.int64)
        return found

    all_sources = [*files["train"], *files["test"], *sources]
    arrays = decoded(f"{name}-{key}" if key else name, VERSION, all_sources, decode)
    _tell(name, folder, dict(zip((what for what, _ in COUNTED), arrays["counts"].tolist(), strict=True)))
    return arrays


def _decode_split(
    files: Sequence[Path], split: str, folder: Path, convert: Convert, numbers: dict[str, int], tally: Tally
) -> NDArray[np.int64]:
    """Write the samples of these files to x and y of the split; gives the user of each, and numbers new ones."""
    owners: list[tuple[int, int]] = []
    with Growing(folder / f"x_{split}.npy") as inputs, Growing(folder / f"y_{split}.npy") as targets:
        for file in files:
            said = _said(file)
            for user, x, y in _users(file):
                count = said.pop(user, len(y))
                if count != len(y):
                    tally.update(disagree=1, said=count, held=len(y))
                try:
                    rows = convert(x, y, tally) if y else (np.empty(0), np.empty(0))
                    if not len(rows[1]):
                        tally["empty"] += 1
                        continue
                    inputs.add(rows[0])
                    targets.add(rows[1])
                except (ValueError, TypeError, OverflowError) as error:
                    raise DataError(f"{file}: user {_shown(user)}: {error}") from error
                owners.append((numbers.setdefault(user, len(numbers)), len(rows[1])))
            tally.update(disagree=len(said), said=sum(said.values()), empty=len(said))  # listed, and not there
    if not owners:
        raise DataError(f"{files[0].parent}: no samples in {len(files)} files; is this LEAF's {split} data?")
    who, how_many = np.array(owners, dtype=np.int64).T
    return np.repeat(who, how_many)


def _users(file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Each user of a file with its inputs and targets, one at a time."""
    found = False
    for user, held in _parsed(file, "user_data"):
        found = True
        if not isinstance(held, dict) or not isinstance(held.get("x"), list) or not isinstance(held.get("y"), list):
            raise DataError(f'{file}: user {_shown(user)}: expected {{"x": […], "y": […]}}')
        if len(held["x"]) != len(held["y"]):
            raise DataError(
                f"{file}: user {_shown(user)}: {len(held['x'])} inputs and {len(held['y'])} targets; expected a target "
                "for each input"
            )
        yield user, held["x"], held["y"]
    if not found:
        raise DataError(f"{file}: no user in 'user_data'; expected LEAF's JSON, with users, num_samples and user_data")


def _said(file: Path) -> dict[str, int]:
    """How many samples the file says that each user has; nothing where it does not say."""
    users, counts = (next(_parsed(file, key), None) for key in ("users", "num_samples"))
    if not isinstance(users, list) or not isinstance(counts, list):
        return {}
    return {
        user: count
        for user, count in zip(users, counts, strict=False)
        if isinstance(user, str) and type(count) is int and 0 <= count < 1 << 40
    }


def _parsed(file: Path, key: str) -> Iterator[Any]:
    """What the top level of the file has under `key`: pairs of user and data for user_data, else the one value."""
    import ijson  # streams JSON, which the standard library does not

    read = ijson.kvitems if key == "user_data" else ijson.items
    try:
        with _opened(file) as stream:
            yield from read(_Shallow(stream, file), key, use_float=True, buf_size=CHUNK)
    except ijson.JSONError as error:
        said = error.args[0] if error.args else ""
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)  # bytes where not UTF-8
        reason = text.partition("\n")[0].removeprefix("parse error: ").removeprefix("lexical error: ")
        raise DataError(f"{file}: malformed JSON at byte {_failing_byte(file):,}: {reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}; it may be cut short: get it again") from error
    except (ValueError, SystemError) as error:  # a number of thousands of digits, text that is not UTF-8
        raise DataError(f"{file}: malformed JSON: {error}") from error


class _Shallow:
    """A stream of JSON that refuses, before a parser sees them, values too deep or too large to be held in memory.

    Only brackets, quotes and backslashes are looked at: between them are long stretches of numbers or text.
    """

    MARKS = re.compile(rb'[\[\]{}"\\]')

    def __init__(self, stream: IO[bytes], file: Path) -> None:
        self._stream = stream
        self._file = file
        self._position = 0
        self._depth = 0
        self._began = 0
        """Where the user, or the list of users, began that is being read."""
        self._in_text = False
        self._escaped = -1
        """The position of a character after a backslash."""

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        for found in self.MARKS.finditer(chunk):
            self._mark(found.group(), self._position + found.start())
        self._position += len(chunk)
        if self._position - self._began > LARGEST:
            raise DataError(f"{self._file}: over {LARGEST:,} bytes for one user from byte {self._began:,} on")
        return chunk

    def _mark(self, mark: bytes, place: int) -> None:
        if self._in_text:
            if place == self._escaped:
                return
            if mark == b"\\":
                self._escaped = place + 1
            self._in_text = mark != b'"'
        elif mark == b'"':
            self._in_text = True
        else:
            self._depth += 1 if mark in b"[{" else -1
            if self._depth > DEEPEST:
                raise DataError(
                    f"{self._file}: byte {place:,}: lists in lists, more than {DEEPEST} deep; expected LEAF's JSON"
                )
            if self._depth <= 2:
                self._began = place


def _opened(file: Path) -> IO[bytes]:
    if file.suffix == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    return open(file, "rb")


def _failing_byte(file: Path) -> int:
    """Where the (unpacked) text stops being JSON: the parser does not say, so it is fed again, slowly at the end."""
    import ijson

    def fails(pieces: Iterable[bytes]) -> int | None:
        """The number of the piece at which parsing fails."""
        events = ijson.sendable_list()
        parser = ijson.basic_parse_coro(events)
        for number, piece in enumerate(pieces):
            try:
                parser.send(piece)
            except (ijson.JSONError, ValueError, SystemError):  # the latter two of a number of thousands of digits
                return number
            del events[:]
        return None

    def narrowed(chunks: int) -> Iterator[bytes]:
        """So many chunks, and then one byte by byte."""
        for _ in range(chunks):
            yield stream.read(CHUNK)
        last = stream.read(CHUNK)
        yield from (last[i : i + 1] for i in range(len(last)))

    with _opened(file) as stream:
        failing = fails(iter(functools.partial(stream.read, CHUNK), b""))
        if failing is None:
            return stream.tell()  # it ends too early
        stream.seek(0)
        place = fails(narrowed(failing))
        return failing * CHUNK + (0 if place is None else place - failing)


def _tell(name: str, folder: Path, counts: dict[str, int]) -> None:
    """One warning with all that was counted."""
    told = [words.format(**counts) for what, words in COUNTED if counts[what] and words]
    if told:
        warnings.warn(f"dataset {_shown(name)} in {folder}: {'; '.join(told)}", stacklevel=4)


def _data(arrays: Arrays, classes: int, **more: Any) -> Data:
    train, test = (
        Samples(arrays[f"x_{split}"], arrays[f"y_{split}"], arrays[f"owner_{split}"]) for split in ("train", "test")
    )
    return Data(train, test, classes, **more)


# What becomes of the samples of each data set.


def _vectors(shape: tuple[int, ...] | None, classes: int | None) -> Convert:
    """Samples that are lists of numbers, and labels below `classes`."""

    def convert(x: list[Any], y: list[Any], tally: Tally) -> Rows:
        return _numbers(x, shape), _labels(y, classes)

    return convert


NUMBERS = frozenset((int, float))


def _numbers(x: list[Any], shape: tuple[int, ...] | None) -> NDArray[np.float32]:
    size = int(np.prod(shape)) if shape else (len(x[0]) if isinstance(x[0], list) else 0)
    for number, sample in enumerate(x):
        if not isinstance(sample, list) or len(sample) != size or not size:
            found = f"{len(sample)} values" if isinstance(sample, list) else _shown(sample)
            raise ValueError(f"sample {number} is {found}; expected a list of {size or 'some'} numbers")
        if not NUMBERS.issuperset(map(type, sample)):
            wrong = next(value for value in sample if type(value) not in NUMBERS)
            raise ValueError(f"sample {number} holds {_shown(wrong)}, something else than numbers")
    try:
        rows = np.array(x, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"samples hold something else than finite numbers: {error}") from error
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise ValueError("samples hold something else than finite numbers")
    return rows.reshape(len(rows), *(shape or (size,)))


def _shown(value: Any) -> str:
    """Short, however long or deep it is."""
    try:
        return SHORT.repr(value)
    except ValueError:  # Python does not write out integers of thousands of digits
        return "a huge number"


SHORT = reprlib.Repr()
SHORT.maxstring = 100


def _labels(y: list[Any], classes: int | None) -> NDArray[np.int64]:
    labels = np.empty(len(y), dtype=np.int64)
    for number, label in enumerate(y):
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if type(label) is not int or not 0 <= label < (classes or 1 << 31):
            below = f" and {classes - 1}" if classes else " and above"
            raise ValueError(f"the label of sample {number} is {_shown(label)}; expected an integer between 0{below}")
        labels[number] = label
    return labels


def _faces(images: Path, side: int, skip: bool, x: list[Any], y: list[Any], tally: Tally) -> Rows:
    """Names of images become bytes (3, side, side)."""
    from PIL import Image

    labels = _labels(y, 2)
    rows = np.empty((len(x), 3, side, side), dtype=np.uint8)
    there = np.ones(len(x), dtype=bool)
    for number, name in enumerate(x):
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"sample {number} is {_shown(name)}; expected the name of an image")
        try:
            with Image.open(images / name) as image:
                rows[number] = np.asarray(image.resize((side, side)).convert("RGB")).transpose(2, 0, 1)
        except FileNotFoundError as error:
            if not skip:
                raise ValueError(
                    f"the image of sample {number}, {images / name}, is missing; put it there, or leave such samples "
                    "out with dataset.missing = 'skip'"
                ) from error
            there[number] = False
            tally["missing"] += 1
        except (OSError, EOFError, SyntaxError, MemoryError, zlib.error, struct.error,
                Image.DecompressionBombError) as error:  # fmt: skip
            raise ValueError(f"the image of sample {number}, {images / name}, cannot be read: {error}") from error
    return rows[there], labels[there]


def _characters(x: list[Any], y: list[Any], tally: Tally) -> Rows:
    """Strings become the numbers of their characters."""
    length = Shakespeare.LENGTH
    for number, (text, following) in enumerate(zip(x, y, strict=True)):
        if not isinstance(text, str) or len(text) != length:
            raise ValueError(f"sample {number} is {_shown(text)}; expected a string of {length} characters")
        if not isinstance(following, str) or len(following) != 1:
            raise ValueError(f"the target of sample {number} is {_shown(following)}; expected one character")
    inputs, targets = (_in_alphabet("".join(texts), tally) for texts in (x, y))
    return inputs.reshape(-1, length), targets.astype(np.int64)


def _in_alphabet(text: str, tally: Tally) -> NDArray[np.uint8]:
    known, last = _alphabet(), len(Shakespeare.ALPHABET) - 1
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    numbers = known[np.minimum(points, len(known) - 1)]
    unknown = numbers > last
    tally["unknown"] += int(unknown.sum())
    return np.where(unknown, np.uint8(last), numbers)


@functools.cache
def _alphabet() -> NDArray[np.uint8]:
    """The number of each ASCII character; 255 for those that have none, of which the last is one."""
    numbers = np.full(128, 255, dtype=np.uint8)
    for number, letter in enumerate(Shakespeare.ALPHABET):
        numbers[ord(letter)] = number
    return numbers


WORD = re.compile(r"[\w']+|[.,!?;]")
TEXT = 4  # of a tweet: its id, date, query, user, text


def _text_of(tweet: Any) -> str | None:
    text = tweet[TEXT] if isinstance(tweet, list) and len(tweet) > TEXT else tweet
    return text if isinstance(text, str) else None


def _sentiments(numbers: dict[str, int], length: int, x: list[Any], y: list[Any], tally: Tally) -> Rows:
    other = len(numbers)
    rows = np.full((len(x), length), other, dtype=np.int32)
    for number, tweet in enumerate(x):
        text = _text_of(tweet)
        if text is None:
            raise ValueError(f"sample {number} is {_shown(tweet)}; expected [id, date, query, user, text, …]")
        kept = [numbers.get(word, other) for word in WORD.findall(text)[:length]]
        rows[number, : len(kept)] = kept
    meaning = {0: 0, 1: 1, 4: 1}
    labels = []
    for number, label in enumerate(y):
        known = int(label) if isinstance(label, str) and re.fullmatch("[0-9]", label) else label
        if type(known) is not int or known not in meaning:
            raise ValueError(f"the label of sample {number} is {_shown(label)}; expected 0 (sad), or 1 or 4 (happy)")
        labels.append(meaning[known])
    return rows, np.array(labels, dtype=np.int64)


def _sequences(numbers: dict[str, int], x: list[Any], y: list[Any], tally: Tally) -> Rows:
    """Comments become their sequences, one after another."""
    inputs: list[list[str]] = []
    targets: list[list[str]] = []
    for number, (comment, target) in enumerate(zip(x, y, strict=True)):
        following: Any = target.get("target_tokens") if isinstance(target, dict) else None
        if not _is_comment(comment):
            raise ValueError(f"sample {number} is {_shown(comment)}; expected a list of sequences of tokens")
        if not _is_comment(following):
            raise ValueError(f"the target of sample {number} has no target_tokens; expected LEAF's preprocessed files")
        counts = target.get("count_tokens")
        if counts is None:
            counts = [[1] * len(sequence) for sequence in following]
        if not _is_counts(counts):
            raise ValueError(f"count_tokens of sample {number} is {_shown(counts)}; expected lists of numbers")
        lengths = [[len(sequence) for sequence in part] for part in (comment, following, counts)]
        if lengths[0] != lengths[1] or lengths[0] != lengths[2]:
            raise ValueError(f"sample {number}: tokens, target_tokens and count_tokens differ in length")
        inputs += comment
        targets += [
            [token if counted else Reddit.PAD for token, counted in zip(*pair, strict=True)]
            for pair in zip(following, counts, strict=True)
        ]
    if len({len(sequence) for sequence in inputs}) > 1:
        raise ValueError("its sequences differ in length; expected LEAF's preprocessed files, all of 10 tokens")
    other = numbers[Reddit.UNKNOWN]
    if not inputs:
        return np.empty(0), np.empty(0)
    ids = np.array([[[numbers.get(token, other) for token in s] for s in part] for part in (inputs, targets)])
    return ids[0].astype(np.int32), ids[1].astype(np.int64)


def _is_comment(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(sequence, list) and all(isinstance(token, str) for token in sequence) for sequence in value
    )


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(sequence, list) and all(type(count) in NUMBERS for count in sequence) for sequence in value
    )


def _most_frequent(words: Iterable[str], count: int) -> list[str]:
    """The `count` most frequent, in alphabetical order where equally so."""
    return [word for word, _ in sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))[:count]]


def _listed_words(file: Path) -> list[str]:
    """The words of a GloVe file, of a list, or of LEAF's embs.json; each once."""
    if file.suffix == ".json":
        found = _json(file)
        words = found.get("vocab") if isinstance(found, dict) else found
    else:
        words = [line.split(" ", 1)[0].strip() for line in _text(file).splitlines()]
    if not isinstance(words, list | dict) or not all(isinstance(word, str) for word in words) or not words:
        raise DataError(f"{file}: expected words: a GloVe file, one word a line, or JSON with a list 'vocab'")
    return [word for word in dict.fromkeys(words) if word]


def _numbered_words(file: Path) -> dict[str, int]:
    """Words and their numbers: LEAF's vocabulary as JSON, {word: number}, or one word a line."""
    if file.suffix in (".pck", ".pkl", ".pickle"):
        raise DataError(
            f"{file}: pickles are not read, as they may run anything; write its dictionary with json.dump to a .json"
        )
    if file.suffix != ".json":
        listed = [Reddit.PAD, Reddit.UNKNOWN, *_text(file).split()]
        return {word: number for number, word in enumerate(dict.fromkeys(listed))}
    found = _json(file)
    numbers = found.get("vocab", found) if isinstance(found, dict) else found
    if not isinstance(numbers, dict):
        raise DataError(f"{file}: expected words and their numbers: {{\"vocab\": {{word: number}}}}")  # fmt: skip
    for word, number in numbers.items():
        if type(number) is not int or not 0 <= number < VOCABULARY:
            raise DataError(
                f"{file}: the number of {_shown(word)} is {_shown(number)}; expected an integer from 0 to "
                f"{VOCABULARY - 1:,}"
            )
    for word in (Reddit.PAD, Reddit.UNKNOWN):
        if word not in numbers:
            raise DataError(f"{file}: it has no {word}; expected a number for it")
    return numbers


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # lists in lists, a number of thousands of digits
        raise DataError(f"{file}: malformed JSON: {error}") from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
