"""Expressions: what a mask is, as an immutable value.

Takes index expressions, tables of data and named masks; gives trees of `Node`, compared and hashed by structure. Nothing here
has lengths, and nothing imports torch.
"""

from flexmask.expr.data import Data
from flexmask.expr.index import Index
from flexmask.expr.packing import document_ids, document_starts
from flexmask.expr.tables import Table

__all__ = ["Data", "Index", "Table", "document_ids", "document_starts"]
