"""Names that Python itself provides, and those that tell a counter or a rank."""

from __future__ import annotations

import re

RANK_NAME = re.compile(r"(^|_)(rank|get_rank)$|^rank_?(id)?$", re.IGNORECASE)

BUILTINS = frozenset(
    """
    abs all any bool dict enumerate filter float getattr hasattr int isinstance issubclass iter len list map max min next object
    open print range reversed round set setattr sorted str sum super tuple type zip divmod callable vars id repr slice
    staticmethod classmethod property Exception ValueError RuntimeError StopIteration KeyError TypeError NotImplementedError
    AssertionError
    """.split()
)

COUNTER_NAMES = frozenset(
    """
    i it idx iter iteration step batch_idx batch_i n_iter iter_num global_step i_batch batch_index iters ni step_idx current_iter
    cur_iter current_iteration current_step cur_step
    """.split()
)
