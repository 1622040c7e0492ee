"""A score at the positions of one call of attention: as a ``score_mod``, or as a bias and a cap for tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.scores.score import Score, ScoreMod, as_score_mod
from flexmask.scores.steps import Alibi, Bias, Relative, Softcap, check_cells


class Form(NamedTuple):
    """A bias, and soft-capping of the sum.

    Attributes:
        bias: None, or what is added to the scores: by the distance ``[B', H', Q + KV]``, where distance ``kv - q`` is at
            ``kv - q + Q`` for the queries and keys of the call, or by cell, ``[B', H', Q, KV]``. B' and H' are 1 to broadcast.
        cap: None, or the bound of soft-capping after that.
    """

    bias: Tensor | None
    cap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedScore:
    """A score of a call, whose first query and first key are at some positions. It is a ``score_mod``.

    Attributes:
        score: the score.
        rows: position of the first query, an int or ``int[B]``.
        columns: position of the first key.
        sizes: B, H, Q and KV of the call; 0 until :meth:`of_call`.
        device: that of the query.
    """

    score: Score
    rows: int | Tensor = 0
    columns: int | Tensor = 0
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)
    device: torch.device | None = None

    def of_call(self, query: Tensor, key: Tensor) -> PlacedScore:
        """The score of a call with these tensors."""
        batch, heads, q_len, _ = query.shape
        return PlacedScore(self.score, self.rows, self.columns, (batch, heads, q_len, key.shape[2]), query.device)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.function()(score, b, h, q_idx, kv_idx)

    def function(self) -> ScoreMod:
        """As a function, which kernels compile."""
        for step in self.score.steps:
            if isinstance(step, Bias):
                check_cells(step.on(self.sizes[1], self.device), self.sizes, self.rows, self.columns)
        return self.score.placed_function(self.sizes[1], self.rows, self.columns, self.device)

    def form(self) -> Form | None:
        """As a bias and a cap after it, or None where it has more steps than these."""
        steps = self.score.steps
        cap = steps[-1].cap if isinstance(steps[-1], Softcap) else None
        additive = steps if cap is None else steps[:-1]
        if any(isinstance(step, Softcap) for step in additive):
            return None
        tables = [self._at_cells(step.on(self.sizes[1], self.device)) for step in additive if isinstance(step, Bias)]
        by_distance = self._by_distance([step for step in additive if isinstance(step, Alibi | Relative)])
        if tables and by_distance is not None:
            tables.insert(0, diagonals(by_distance, 0, *self.sizes[2:]))
        return Form(sum(tables[1:], tables[0]) if tables else by_distance, cap)

    def _by_distance(self, steps: list[Alibi | Relative]) -> Tensor | None:
        if not steps:
            return None
        _, heads, q_len, kv_len = self.sizes
        distance = torch.arange(-q_len, kv_len, device=self.device) + _along(self.columns) - _along(self.rows)
        h = torch.arange(heads, device=self.device)[:, None]
        first, *others = (step.by_distance(heads, self.device)(h, distance) for step in steps)
        found: Tensor = sum(others, first)
        return found if found.dim() == 3 else found[None]

    def _at_cells(self, table: Tensor) -> Tensor:
        """The part of a table of positions that is of the cells of the call."""
        check_cells(table, self.sizes, self.rows, self.columns)
        _, _, q_len, kv_len = self.sizes
        rows, columns = self.rows, self.columns
        if isinstance(rows, int) and isinstance(columns, int) and columns >= 0:
            return table[:, :, rows : rows + q_len, columns : columns + kv_len]
        b, h = (torch.arange(size, device=self.device) for size in table.shape[:2])
        q = (torch.arange(q_len, device=self.device) + _along(rows)).view(-1, 1, q_len, 1)
        kv = (torch.arange(kv_len, device=self.device) + _along(columns)).clamp(min=0).view(-1, 1, 1, kv_len)
        return table[b[:, None, None, None], h[:, None, None], q, kv]


def placed_score(score_mod: object, q_offset: int | Tensor) -> ScoreMod | None:
    """A score, its text or a function of a user as a ``score_mod``, of a call whose first query is at this position.

    Raises:
        OperandError: it is none of these.
        TextError: a text that is not a score.
    """
    found = as_score_mod(score_mod)
    return PlacedScore(found, q_offset) if isinstance(found, Score) else found


def _along(position: int | Tensor) -> int | Tensor:
    return position[:, None, None] if isinstance(position, Tensor) else position


def diagonals(values: Tensor, start: int, rows: int, keys: int) -> Tensor:
    """Cells with a value for each distance: ``[B', H', n]`` -> ``[B', H', rows, keys]``, cell (i, j) that of ``rows - i + j``.

    Args:
        values: of which ``rows + keys`` count.
        start: the first of these.
        rows: the rows.
        keys: the keys.
    """
    return _cells(values[..., start : start + rows + keys].unsqueeze(2).expand(-1, -1, rows, -1).contiguous(), keys)


def sum_diagonals(cells: Tensor) -> Tensor:
    """The sums of `diagonals`: ``[B', H', rows, keys]`` -> ``[B', H', rows + keys]``, the gradient of its values."""
    batch, heads, rows, keys = cells.shape
    values = cells.new_zeros(batch, heads, rows, rows + keys)
    _cells(values, keys).copy_(cells)
    return values.sum(2)


def _cells(values: Tensor, keys: int) -> Tensor:
    """The cells of `diagonals`, a view of the values of each row, ``[B', H', rows, rows + keys]``."""
    batch, heads, rows, width = values.shape
    return values.view(batch, heads, rows * width)[..., rows:].view(batch, heads, rows, width - 1)[..., :keys]
