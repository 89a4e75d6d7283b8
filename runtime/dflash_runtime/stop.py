"""Stop strings over text which arrives in chunks.

Knows only strings. The result depends on the text alone, never on where its chunks were cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_graphs.errors import RequestError


class StopStrings:
    """Finds the stop string which is complete first; of several complete at once, the longest.

    Follows every string with a Knuth-Morris-Pratt automaton: linear in the text, and the longest automaton state is
    exactly the text to hold back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Watch for `strings`; none at all lets every text through at once.

        Raises:
            RequestError: a stop string is empty.
        """
        if "" in strings:
            raise RequestError("a stop string is empty; leave it out or give it at least one character")
        self._strings = sorted(set(strings), key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._states = [0] * len(self._strings)  # how many characters of each string the text ends with
        self._held = ""
        self._matched: str | None = None

    def feed(self, chunk: str) -> tuple[str, str | None]:
        """The text now safe to emit, and the stop string found or `None`.

        The stop string and what follows it are never emitted; after a match every call returns `("", match)`.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + chunk
        for end, character in enumerate(chunk, start=len(self._held) + 1):
            self._advance(character)
            if self._matched is not None:
                self._held = ""
                return text[: end - len(self._matched)], self._matched
        safe = len(text) - max(self._states, default=0)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text held back, which the end of the stream has made safe; the matcher is then ready for a new text."""
        rest, self._held = self._held, ""
        self._states = [0] * len(self._strings)
        self._matched = None
        return rest

    def _advance(self, character: str) -> None:
        for index, (string, borders) in enumerate(zip(self._strings, self._borders, strict=True)):
            state = self._states[index]
            while state and string[state] != character:
                state = borders[state - 1]
            state += string[state] == character
            self._states[index] = state
            if state == len(string):
                self._matched = string
                return  # longest first, so no longer string is complete here


def _borders(string: str) -> list[int]:
    """For each prefix of `string`, the length of its longest proper prefix which is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        length += string[index] == string[length]
        borders[index] = length
    return borders
