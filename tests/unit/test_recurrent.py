"""Which rows of a call are said to stand before and behind the boundary: more would be right too, but cost time."""

from dflash_graphs.specs import CHUNK, WINDOW
from dflash_runtime.recurrent import _listed


def test_rows_are_listed_where_they_stand() -> None:
    for pending in range(CHUNK):
        for rows in range(1, WINDOW - pending + 1):
            before, behind = (part.tolist() for part in _listed(pending, rows))
            places = range(pending, pending + rows)
            assert before == [row for row, place in enumerate(places) if place < CHUNK]
            if places[-1] == CHUNK - 1:  # the boundary is reached, and the state there wanted
                assert behind == [rows - 1]
            else:
                assert behind == [row for row, place in enumerate(places) if place >= CHUNK]
