"""Code, documentation and tests use the words of the field: no private vocabulary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = (
    *("say", "said", "tell", "told", "speak", "speaker", "spoke", "spoken", "hear", "heard", "parcel", "news"),
    *("nonsense", "refuse", "stranger", "gone", "silent", "die", "died", "regain", "farewell", "commons", "ground"),
    *("workshop", "occurrence", "happening", "room", "door", "spell", "spelt", "rebuilt", "misfit", "confer"),
    *("attend", "finder", "fronts", "gathering", "company", "haunt", "ghost", "befell"),
    *("whoever", "whomever", "nobody", "somebody", "everybody"),
)
"""Words with a plainer one: send, receive, message, failed, rejected, unauthenticated, `Setup`, `to_table`, …"""
ORDINARY = ("conditions", "words", "part", "finds", "opening", "circle", "filling", "spread")
"""Ordinary English in texts, but unclear as the name of a class or a function."""
LISTS = ("docs/decisions/names.md", "tests/test_vocabulary.py")
"""Files that list the words themselves."""
EXCEPTIONS: dict[str, tuple[str, ...]] = {
    # Former names
    "CHANGELOG.md": ("strangers", "speaks", "says", "ground", "refuse"),
    "src/shoal/results/records.py": ("strangers",),
    "src/shoal/traits.py": ("speaks", "says", "misfits", "attend", "finder"),
    "tests/test_cli.py": ("strangers",),
    "tests/test_records.py": ("strangers",),
    "tests/test_traits.py": ("speaks", "says", "misfits", "attend", "finder"),
    # Values of options
    "docs/networks.md": ("refuse",),
    "docs/privacy.md": ("refuse",),
    "src/shoal/environment/network/matrix.py": ("refuse",),
    "src/shoal/sharing/secure/secure.py": ("refuse",),
    "tests/test_networks.py": ("refuse",),
    # Names of other libraries
    "src/shoal/results/exports/to_wandb.py": ("silent",),
    # Fields of messages
    "src/shoal/algorithms/support/pairwise_averaging.py": ("refused",),
    "src/shoal/algorithms/support/server.py": ("company",),
    "src/shoal/sharing/secure/messages.py": ("refused", "speakers"),
    "src/shoal/testing/_mutations.py": ("refused",),
    "tests/secure_world.py": ("speakers",),
    "tests/test_adpsgd.py": ("refused",),
    "tests/test_secure_experiments.py": ("company", "refuse"),
    "tests/test_secure_responder.py": ("refused", "speakers"),
    "tests/test_secure_unmasking.py": ("refused",),
    # Other meanings
    "examples/shakespeare.toml": ("speaking",),  # roles of a play
    "src/shoal/compression/compressors.py": ("part",),  # of a vector
    "src/shoal/data/leaf/text.py": ("occurrences", "speaking"),  # of a word in a text; roles of a play
    "src/shoal/models/layers.py": ("attended",),  # attention
    "src/shoal/sweeps/tuners.py": ("tell",),  # the method of an Optuna study
    "src/shoal/training/inputs.py": ("part",),  # of the data
}
"""Words that a file may contain, as they are written there."""
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("src", "docs", "examples", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".toml", ".csv", ".xml") and path.relative_to(ROOT).as_posix() not in LISTS
)
PAGES = [Path("README.md"), Path("CHANGELOG.md"), Path("Makefile")]
DEFINED = re.compile(r"^\s*(?:class|(?:async )?def) (\w+)", re.MULTILINE)


def forms(word: str) -> str:
    """Return a pattern for a word and its inflections."""
    stem = word.removesuffix("e")
    return rf"{word}(?:s|es|d|ed|ing)?|{stem}ing"


def words_in(text: str) -> list[str]:
    """Return the words of a text, also those inside identifiers: `said_all`, `SetupCommons`."""
    text = text.replace(".tell()", "")  # the method of a file
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)]


def unclear_words(path: Path, text: str) -> set[str]:
    allowed = EXCEPTIONS.get(path.as_posix(), ())
    texts = re.compile("|".join(map(forms, WORDS)))
    names = re.compile(rf"_?(?:{'|'.join(map(forms, ORDINARY))})", re.IGNORECASE)
    found = {word for word in words_in(text) if texts.fullmatch(word)}
    if path.suffix == ".py":
        found |= {name.strip("_").lower() for name in DEFINED.findall(text) if names.fullmatch(name)}
    return found - set(allowed)


@pytest.mark.parametrize("path", [*PAGES, *FILES], ids=str)
def test_only_words_of_the_field(path: Path) -> None:
    assert not unclear_words(path, (ROOT / path).read_text())


@pytest.mark.parametrize("path", sorted(EXCEPTIONS))
def test_every_exception_is_needed(path: str) -> None:
    text = (ROOT / path).read_text()
    assert set(EXCEPTIONS[path]) <= set(words_in(text))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("It says nothing.", "says"),
        ("def say_hello() -> None: ...", "say"),
        ("heard_from = 3", "heard"),
        ("class SetupCommons: ...", "commons"),
        ("_spelt = {}", "spelt"),
        ("REFUSED = 1", "refused"),
        ("refusing", "refusing"),
        ("class Opening: ...", "opening"),
        ("    async def spread(self) -> None: ...", "spread"),
    ],
)
def test_a_word_is_found_in_texts_and_identifiers(text: str, word: str) -> None:
    assert unclear_words(Path("some.py"), text) == {word}


@pytest.mark.parametrize(
    "text", ["Nodes take part.", "an essay", "spread evenly", "file.tell()", "def parts_of(): ..."]
)
def test_ordinary_english_is_allowed(text: str) -> None:
    assert not unclear_words(Path("some.py"), text)
