"""Stop strings: against a plain search over the whole text, for every way of cutting it into chunks."""

from __future__ import annotations

import random
import time

import pytest
from dflash_graphs.errors import RequestError
from dflash_runtime.stop import StopStrings


def search(text: str, strings: list[str]) -> tuple[str, str | None]:
    """What is before the stop string which ends first (the longest of several), by looking at every end."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(text: str, strings: list[str]) -> int:
    """Length of the longest end of the text which could begin a stop string."""
    sizes = [size for string in strings for size in range(len(string)) if text.endswith(string[:size])]
    return max(sizes, default=0)


def chunks(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_result_is_that_of_a_search_however_the_text_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        strings = ["".join(rng.choice("aab") for _ in range(rng.randrange(1, 9))) for _ in range(rng.randrange(4))]
        beginnings = [string[: rng.randrange(len(string) + 1)] for string in strings * 2]
        text = "".join(rng.choice([*beginnings, "a", "b", "c"]) for _ in range(rng.randrange(9)))
        stop, emitted, matched, fed = StopStrings(strings), "", None, ""
        for chunk in chunks(rng, text):
            safe, matched = stop.feed(chunk)
            emitted, fed = emitted + safe, fed + chunk
            if matched is None:
                assert len(fed) - len(emitted) == held_back(fed, strings), (text, strings)
        assert (emitted + stop.flush(), matched) == search(text, strings), (text, strings)


def test_text_without_a_possible_stop_passes_at_once() -> None:
    stop = StopStrings(["</tool_call>", "\n\nUser:"])
    assert stop.feed("all of it") == ("all of it", None)
    assert stop.feed(" and a line\n") == (" and a line", None)
    assert stop.feed("more") == ("\nmore", None)
    assert stop.flush() == ""


def test_nothing_after_a_match_is_emitted() -> None:
    stop = StopStrings(["STOP"])
    assert stop.feed("before ST") == ("before ", None)
    assert stop.feed("OP after") == ("", "STOP")
    assert stop.feed("more") == ("", "STOP")
    assert stop.flush() == ""
    assert stop.feed("a new text") == ("a new text", None)


def test_held_text_is_flushed_once() -> None:
    stop = StopStrings(["STOP"])
    assert stop.feed("the STO") == ("the ", None)
    assert stop.flush() == "STO"
    assert stop.flush() == ""
    assert stop.feed("P") == ("P", None)  # the flushed text is gone from the matcher too


def test_longest_of_the_strings_complete_at_once_is_found() -> None:
    assert StopStrings(["b", "ab"]).feed("xab") == ("x", "ab")


def test_match_begins_within_a_failed_one() -> None:
    assert StopStrings(["aabaaac"]).feed("aabaaabaaac") == ("aaba", "aabaaac")


def test_no_strings_let_everything_through() -> None:
    assert StopStrings([]).feed("text") == ("text", None)


def test_empty_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


def test_time_is_linear_for_a_long_stop_string() -> None:
    stop = StopStrings(["a" * 20_000 + "b"])
    start = time.monotonic()
    for _ in range(400):
        stop.feed("a" * 100)
    assert stop.feed("b")[1] is not None
    assert time.monotonic() - start < 60
