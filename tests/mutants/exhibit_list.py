"""What the gallery shows: one exhibit per class of defects, those that rounding hides last."""

from __future__ import annotations

from tests.mutants.exhibits import Exhibit
from tests.mutants.exhibits_of_asynchrony import ASYNCHRONY
from tests.mutants.exhibits_of_order import ORDER
from tests.mutants.exhibits_of_resharding import RESHARDING
from tests.mutants.exhibits_of_values import HIDDEN, VALUES

EXHIBITS: tuple[Exhibit, ...] = (*VALUES, *ORDER, *ASYNCHRONY, *RESHARDING, *HIDDEN)
