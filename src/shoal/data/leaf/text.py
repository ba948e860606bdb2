"""LEAF's data sets of text: Shakespeare, Sent140 and Reddit."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data
from shoal.data.decoded import Arrays
from shoal.data.leaf.decoding import Convert, Flaws, Rows, conversion_only, decode_leaf, leaf_data
from shoal.data.leaf.json_reader import read_users, shorten
from shoal.data.leaf.vectors import NUMBERS
from shoal.data.leaf.vocabulary import most_frequent, read_numbered_words, read_words
from shoal.types import Bounds


@dataclass(frozen=True)
class Shakespeare:
    """LEAF's Shakespeare (2018): the next character after 80, by 1,129 speaking roles; 80 characters.

    Inputs are the numbers of characters in LEAF's alphabet, (80,) bytes; a model casts them before the lookup. As in
    LEAF's own code, a character that is not in the alphabet counts as the last one. Such characters are reported.
    """

    path: Path | None = None

    ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
    LENGTH = 80

    def load(self, seed: int) -> Data:
        size = len(self.ALPHABET)
        return leaf_data(decode_leaf("shakespeare", self.path, conversion_only(_characters)), size, sizes=(size,))


def _characters(x: list[Any], y: list[Any], flaws: Flaws) -> Rows:
    """Convert strings to the numbers of their characters."""
    length = Shakespeare.LENGTH
    for number, (text, following) in enumerate(zip(x, y, strict=True)):
        if not isinstance(text, str) or len(text) != length:
            raise ValueError(f"sample {number} is {shorten(text)}; expected a string of {length} characters")
        if not isinstance(following, str) or len(following) != 1:
            raise ValueError(f"the target of sample {number} is {shorten(following)}; expected one character")
    inputs, targets = (_character_numbers("".join(texts), flaws) for texts in (x, y))
    return inputs.reshape(-1, length), targets.astype(np.int64)


def _character_numbers(text: str, flaws: Flaws) -> NDArray[np.uint8]:
    known, last = _ascii_numbers(), len(Shakespeare.ALPHABET) - 1
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    numbers = known[np.minimum(points, len(known) - 1)]
    unknown = numbers > last
    flaws["unknown"] += int(unknown.sum())
    return np.where(unknown, np.uint8(last), numbers)


@functools.cache
def _ascii_numbers() -> NDArray[np.uint8]:
    """Return the number of each ASCII character. 255 marks unknown ones; the last ASCII character is one of them."""
    numbers = np.full(128, 255, dtype=np.uint8)
    for number, letter in enumerate(Shakespeare.ALPHABET):
        numbers[ord(letter)] = number
    return numbers


@dataclass(frozen=True)
class Sent140:
    """LEAF's Sent140 (2018): is a tweet happy or sad? Tweets by 660,120 users as 25 words, 2 classes.

    Text is split into words as LEAF does. The vocabulary is `words`, or the `vocabulary` most frequent words of the
    training data. One more number stands for any other word and pads short tweets.
    """

    path: Path | None = None
    words: Path | None = None
    """A GloVe file (each line starts with a word), a list of words (one per line), or LEAF's embs.json."""
    vocabulary: Annotated[int, Bounds(at_least=1)] = 10_000
    length: Annotated[int, Bounds(at_least=1)] = 25

    def load(self, seed: int) -> Data:
        sources = [] if self.words is None else [self.words]
        key = f"{self.vocabulary}-{self.length}"
        arrays = decode_leaf("sent140", self.path, self._prepare, key=key, sources=sources)
        return leaf_data(arrays, classes=2, sizes=(arrays["size"].item(),))

    def _prepare(self, train: Sequence[Path]) -> tuple[Convert, Arrays]:
        if self.words is not None:
            words = read_words(self.words)
        else:
            tweets = (tweet for file in train for _, x, _ in read_users(file) for tweet in x)
            occurrences = (word for tweet in tweets for word in WORD.findall(_tweet_text(tweet) or ""))
            words = most_frequent(occurrences, self.vocabulary)
        numbers = {word: number for number, word in enumerate(words)}
        return functools.partial(_sentiments, numbers, self.length), {
            "size": np.array(len(words) + 1),
            "words": np.frombuffer("\n".join(words).encode("utf-8", "surrogatepass"), dtype=np.uint8),
        }


WORD = re.compile(r"[\w']+|[.,!?;]")
TEXT_FIELD = 4  # a tweet is [id, date, query, user, text, …]
SENTIMENTS = {0: 0, 1: 1, 4: 1}


def _tweet_text(tweet: Any) -> str | None:
    text = tweet[TEXT_FIELD] if isinstance(tweet, list) and len(tweet) > TEXT_FIELD else tweet
    return text if isinstance(text, str) else None


def _sentiments(numbers: dict[str, int], length: int, x: list[Any], y: list[Any], flaws: Flaws) -> Rows:
    """Convert tweets to the numbers of their words."""
    other = len(numbers)
    rows = np.full((len(x), length), other, dtype=np.int32)
    for number, tweet in enumerate(x):
        text = _tweet_text(tweet)
        if text is None:
            raise ValueError(f"sample {number} is {shorten(tweet)}; expected [id, date, query, user, text, …]")
        kept = [numbers.get(word, other) for word in WORD.findall(text)[:length]]
        rows[number, : len(kept)] = kept
    labels = []
    for number, label in enumerate(y):
        parsed = int(label) if isinstance(label, str) and re.fullmatch("[0-9]", label) else label
        if type(parsed) is not int or parsed not in SENTIMENTS:
            raise ValueError(f"the label of sample {number} is {shorten(label)}; expected 0 (sad), or 1 or 4 (happy)")
        labels.append(SENTIMENTS[parsed])
    return rows, np.array(labels, dtype=np.int64)


@dataclass(frozen=True)
class Reddit:
    """LEAF's Reddit (2018): the next word, in comments of 1.66 million users cut into sequences of 10 words.

    LEAF's preprocessed files: a comment is a list of sequences of tokens, with <BOS>, <EOS> and <PAD>. Its target has
    `target_tokens`, the same tokens shifted by one. A sample here is one sequence. <PAD> is 0; <UNK>, any other word,
    is 1. A target does not count if it is <PAD> or if `count_tokens` excludes it.
    """

    path: Path | None = None
    vocab: Path | None = None
    """Words with their numbers as JSON, or one word per line; by default the most frequent of the training data."""
    vocabulary: Annotated[int, Bounds(at_least=3)] = 10_000
    """The number of words, including <PAD> and <UNK>."""

    PAD, UNKNOWN = "<PAD>", "<UNK>"

    def load(self, seed: int) -> Data:
        sources = [] if self.vocab is None else [self.vocab]
        arrays = decode_leaf("reddit", self.path, self._prepare, key=str(self.vocabulary), sources=sources)
        size = arrays["size"].item()
        return leaf_data(arrays, size, task="sequence", sizes=(size,), padding=arrays["padding"].item())

    def _prepare(self, train: Sequence[Path]) -> tuple[Convert, Arrays]:
        special = [self.PAD, self.UNKNOWN]
        if self.vocab is not None:
            numbers = read_numbered_words(self.vocab, special)
        else:
            comments = (comment for file in train for _, x, _ in read_users(file) for comment in x)
            sequences = (sequence for comment in comments if _is_comment(comment) for sequence in comment)
            occurrences = (token for sequence in sequences for token in sequence if token not in special)
            words = [*special, *most_frequent(occurrences, self.vocabulary - len(special))]
            numbers = {word: number for number, word in enumerate(words)}
        size = np.array(max(numbers.values()) + 1)
        return functools.partial(_sequences, numbers), {"size": size, "padding": np.array(numbers[self.PAD])}


def _sequences(numbers: dict[str, int], x: list[Any], y: list[Any], flaws: Flaws) -> Rows:
    """Convert comments to their sequences."""
    inputs: list[list[str]] = []
    targets: list[list[str]] = []
    for number, (comment, target) in enumerate(zip(x, y, strict=True)):
        following: Any = target.get("target_tokens") if isinstance(target, dict) else None
        if not _is_comment(comment):
            raise ValueError(f"sample {number} is {shorten(comment)}; expected a list of sequences of tokens")
        if not _is_comment(following):
            raise ValueError(f"the target of sample {number} has no target_tokens; expected LEAF's preprocessed files")
        counts = target.get("count_tokens")
        if counts is None:
            counts = [[1] * len(sequence) for sequence in following]
        if not _is_counts(counts):
            raise ValueError(f"count_tokens of sample {number} is {shorten(counts)}; expected lists of numbers")
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
