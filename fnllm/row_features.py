"""The sampler features that the running rows need, looked up again only when the rows change."""

import functools
from collections.abc import Sequence

import numpy as np

from fnllm.sampler import SamplerFeatures, union


class RowFeatures:
    """Each row's features, and together those of the batch that was asked for last."""

    def __init__(self, max_num_seqs: int):
        self.of_row = [SamplerFeatures()] * max_num_seqs
        self.rows = np.zeros(0, np.int32)  # of that batch; none where a row has got other features since
        self.together = SamplerFeatures()

    def join(self, rows: Sequence[int], features: Sequence[SamplerFeatures]) -> SamplerFeatures:
        """Give rows other features; returns those of the last batch with them."""
        for row, own in zip(rows, features, strict=True):
            self.of_row[row] = own
        self.rows = np.zeros(0, np.int32)
        self.together = functools.reduce(union, features, self.together)
        return self.together

    def turn_to(self, rows: np.ndarray) -> bool:
        """Make `together` those of a batch of these rows; whether they are other rows than the last ones."""
        if np.array_equal(self.rows, rows):
            return False
        self.rows = rows
        self.together = functools.reduce(union, (self.of_row[row] for row in rows.tolist()), SamplerFeatures())
        return True

    def function_numbers(self) -> list[int]:
        """The place of each row's logits_fn among the batch's; -1 for a row without one."""
        places = {function: place for place, function in enumerate(self.together.logits_fns)}
        own = (self.of_row[row].logits_fns for row in self.rows.tolist())
        return [places[mine[0]] if mine else -1 for mine in own]
