"""Code and documentation use the words of the field: no private vocabulary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = (
    *("say", "said", "told", "speak", "speaks", "spoken", "hear", "hears", "heard", "parcel", "nonsense", "stranger"),
    *("strangers", "died", "dies", "regain", "farewell", "commons", "workshop", "happening", "spelt", "rebuilt"),
    *("misfit", "misfits", "haunt", "ghost", "whoever", "whomever", "nobody", "somebody", "everybody", "befell"),
)
"""Words with a plainer one: send, receive, message, failed, invalid, unauthenticated, `Setup`, `to_table`, …"""
EXCEPTIONS = {
    "docs/decisions/names.md": WORDS,  # the old names
    "src/shoal/results/records.py": ("strangers",),  # the old key, which is still read
    "src/shoal/traits.py": ("speaks", "misfits"),  # old names, which are rejected
}
FILES = sorted(
    path.relative_to(ROOT)
    for folder, kinds in (("src", "*.py"), ("docs", "*.md"), ("examples", "*.toml"), ("examples", "*.py"))
    for path in (ROOT / folder).rglob(kinds)
)


@pytest.mark.parametrize("path", [Path("README.md"), *FILES], ids=str)
def test_only_words_of_the_field(path: Path) -> None:
    allowed = EXCEPTIONS.get(path.as_posix(), ())
    pattern = re.compile(rf"\b({'|'.join(word for word in WORDS if word not in allowed) or 'x^'})\b", re.IGNORECASE)
    lines = (ROOT / path).read_text().splitlines()
    found = [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if pattern.search(line)]
    assert not found, "\n".join(found)
