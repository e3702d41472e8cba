"""What is said of a word that nobody knows: what may be meant, and which letter is foreign."""

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from zerojax.config.errors import shown

_LISTED = 20
"""Unknown words that are judged one by one."""

_LONGEST = 100
"""Characters of a word that is compared with those that are known."""

_COMPARED = 1000
"""Known words with which one is compared."""


def judged(words: Sequence[str], judge: Callable[[str], str]) -> list[str]:
    """One sentence for each of the first words, and one for all the others together.

    To judge one takes half a millisecond, as it is compared with all that are known.

    Example:
      >>> judged([f"k{i}" for i in range(300)], lambda word: f"{word}: unknown key")[-2:]
      ['k19: unknown key', 'k20: unknown key; and 279 more like it']
    """
    found = [judge(word) for word in words[: _LISTED + 1]]
    if rest := len(words) - len(found):
        found[-1] += f"; and {rest} more like it"
    return found


def spelled(name: str) -> str:
    """A name as it stands in a dotted path: in quotes where it would not be seen for what it is.

    Example:
      >>> print(spelled("stage"), spelled(""), spelled("a.b"))
      stage "" "a.b"
    """
    plain = name and name.isprintable() and not re.search(r'[.:="]|\s', name)
    return name if plain and len(name) <= _LONGEST else shown(name)


def hint(word: str, guess: str | None, otherwise: str) -> str:
    """The end of a sentence on an unknown word.

    Args:
      word: the word.
      guess: what may be meant, of :func:`closest`.
      otherwise: what is said without a guess.

    Example:
      >>> print(hint("st\u0430ge", "stage", "take it out"))
      did you mean `stage`? (\u0430 is CYRILLIC SMALL LETTER A, U+0430)
    """
    said = f"did you mean `{guess}`?" if guess else otherwise
    strange = foreign(word)
    return f"{said} ({strange})" if strange else said


def foreign(word: str) -> str:
    """Names the characters of a word that no key has, or "".

    Example:
      >>> print(foreign("b\u0443te\u200b"))
      \u0443 is CYRILLIC SMALL LETTER U, U+0443; there is an invisible ZERO WIDTH SPACE, U+200B
    """
    odd = dict.fromkeys(c for c in word[:_LONGEST] if not c.isascii())
    return "; ".join(_named(c) for c in list(odd)[:3])


def _named(character: str) -> str:
    name = f"{unicodedata.name(character, 'a character')}, U+{ord(character):04X}"
    seen = character.isprintable() and not unicodedata.combining(character)
    return f"{character} is {name}" if seen else f"there is an invisible {name}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely stands for, or None.

    Example:
      >>> closest("zero_optimisation", ["optimizer", "zero_optimization"])
      'zero_optimization'
    """
    if len(word) > _LONGEST:
        return None
    by_lower = {name.lower(): name for name in islice(known, _COMPARED)}
    word = unicodedata.normalize("NFKC", word).lower()
    ascii_ = sum(c.isascii() for c in word)
    if not word.isascii() and ascii_ * 2 >= len(word):
        # A letter of another alphabet stands for one, a character without width for none.
        pattern = "".join(re.escape(c) if c.isascii() else ".?" for c in word)
        alike = [name for name in by_lower if re.fullmatch(pattern, name)]
        if alike:
            return by_lower[max(alike, key=len)]
    found = difflib.get_close_matches(word, by_lower, n=1, cutoff=0.7)
    return by_lower[found[0]] if found else None
