"""The transportation problem: amounts from rows to columns with the greatest total gain.

Invariants of `transport`:
- every row gives its whole supply and every column takes its whole demand;
- no other amounts gain more;
- other amounts gain as much if and only if they use free entries alone;
- equal input gives equal amounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from realrl.plan.parameters.realloc_portions import Matrix

Flags = npt.NDArray[np.bool_]


def transport(gains: Matrix, supplies: Sequence[int], demands: Sequence[int]) -> tuple[Matrix, Flags]:
    """Solve the transportation problem exactly: integer amounts [rows, columns] of the greatest total gain.

    Uses successive shortest augmenting paths with dual prices (Edmonds and Karp 1972). Rows of equal gains are served
    as one, and so are columns; each row is first served from its own best columns.

    Args:
        gains: int64 [rows, columns], the gain of one unit.
        supplies: units that each row gives.
        demands: units that each column takes; the same in total.

    Returns:
        The amounts, and flags of the free entries, both [rows, columns].
    """
    (rows, row_kinds), (columns, column_kinds) = _alike(gains), _alike(gains.T)
    left, room = list(supplies), list(demands)
    amounts = np.zeros_like(gains)
    amounts_of_kinds, is_free = _transport(
        gains[[members[0] for members in rows]][:, [members[0] for members in columns]],
        [sum(left[row] for row in members) for members in rows],
        [sum(room[column] for column in members) for members in columns],
    )
    for row_kind, column_kind in np.argwhere(amounts_of_kinds).tolist():
        to_give = int(amounts_of_kinds[row_kind, column_kind])
        while to_give:
            row, column = rows[row_kind][-1], columns[column_kind][-1]
            amount = min(left[row], room[column], to_give)
            amounts[row, column] += amount
            to_give -= amount
            for rest, members in ((left, rows[row_kind]), (room, columns[column_kind])):
                rest[members[-1]] -= amount
                if not rest[members[-1]]:
                    members.pop()
    return amounts, is_free[row_kinds][:, column_kinds]


def _alike(rows: Matrix) -> tuple[list[list[int]], list[int]]:
    """Group equal rows; returns the numbers of each group's rows, last first, and the group of each row."""
    groups: dict[bytes, list[int]] = {}
    keys = [row.tobytes() for row in rows]
    for number in reversed(range(len(keys))):
        groups.setdefault(keys[number], []).append(number)
    places = {key: place for place, key in enumerate(groups)}
    return list(groups.values()), [places[key] for key in keys]


def _transport(gains: Matrix, supplies: Sequence[int], demands: Sequence[int]) -> tuple[Matrix, Flags]:
    """Solve the problem without regard to equal rows and columns."""
    costs = -gains
    n_rows, n_columns = costs.shape
    amounts = np.zeros((n_rows, n_columns), dtype=np.int64)
    left = np.array(supplies, dtype=np.int64)
    room = np.array(demands, dtype=np.int64)
    column_prices = np.zeros(n_columns, dtype=np.int64)
    row_prices = costs.min(axis=1)
    for row in range(n_rows):
        for column in np.flatnonzero(costs[row] == row_prices[row]).tolist():
            amount = min(left[row], room[column])
            amounts[row, column] += amount
            left[row] -= amount
            room[column] -= amount
    for row in np.flatnonzero(left).tolist():
        while left[row]:
            _augment(row, costs, amounts, left, room, row_prices, column_prices)
    return amounts, costs == row_prices[:, None] + column_prices


def _augment(
    start: int,
    costs: Matrix,
    amounts: Matrix,
    left: Matrix,
    room: Matrix,
    row_prices: Matrix,
    column_prices: Matrix,
) -> None:
    """Send as many units as fit from row `start` along a cheapest path to a column with room; adjust the prices."""
    n_rows, n_columns = costs.shape
    far = np.iinfo(np.int64).max // 4
    distances, open_distances = (np.full(n_columns, far, dtype=np.int64) for _ in range(2))
    row_distances = np.full(n_rows, far, dtype=np.int64)
    via_row = np.full(n_columns, -1, dtype=np.int64)  # the row from which a column is reached
    via_column = np.full(n_rows, -1, dtype=np.int64)  # the column, which a row serves, from which the row is reached
    is_done = np.zeros(n_columns, dtype=bool)
    new_rows, distance = np.array([start]), 0
    row_distances[start] = 0
    while True:
        if len(new_rows):
            reduced = costs[new_rows] - row_prices[new_rows, None] - column_prices + distance
            reached = reduced.min(axis=0)
            closer = np.flatnonzero(reached < distances)  # of no column that is done: it is as near as any row now
            distances[closer] = open_distances[closer] = reached[closer]
            via_row[closer] = new_rows[reduced[:, closer].argmin(axis=0)]
        distance = int(open_distances.min())
        nearest = np.flatnonzero(open_distances == distance)
        free = nearest[room[nearest] > 0]
        if len(free):
            break
        is_done[nearest] = True
        open_distances[nearest] = far
        serves = amounts[:, nearest] > 0
        new_rows = np.flatnonzero(serves.any(axis=1) & (row_distances == far))
        row_distances[new_rows] = distance
        via_column[new_rows] = nearest[serves[new_rows].argmax(axis=1)]
    reached_rows = row_distances < far
    row_prices[reached_rows] += distance - row_distances[reached_rows]
    column_prices[is_done] -= distance - distances[is_done]
    path: list[tuple[int, int]] = []
    column = int(free[0])
    while column >= 0:
        path.append((int(via_row[column]), column))
        column = int(via_column[path[-1][0]])
    steps = [(row, after) for (row, _), (_, after) in pairwise(path)]
    amount = min([int(left[start]), int(room[path[0][1]]), *(int(amounts[step]) for step in steps)])
    for row, column in path:
        amounts[row, column] += amount
    for row, column in steps:
        amounts[row, column] -= amount
    left[start] -= amount
    room[path[0][1]] -= amount
