"""Which step wrote each cache block last, so that older states recompute blocks that were overwritten.

The host's own account, kept from the plans: nothing is read from the device.
"""

import numpy as np

from fnllm.scheduler import Plan


class Writes:
    """A clock of steps, and its time at each block's last write."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_blocks: int):
        self.block_size = block_size
        self.clock = 0
        self.written = np.zeros(num_blocks, np.int64)  # 0: never
        self.tables = np.zeros((max_num_seqs, max_blocks), np.int32)  # the rows' block tables, as on the device

    def follow(self, plan: Plan) -> None:
        """Count the plan's step, and note it at every block that it writes: copies, and those of its new tokens."""
        self.clock += 1
        target = plan.copies[1]
        if len(target):
            self.written[target] = self.clock
        for join in plan.joins:
            self.tables[join.row, : len(join.block_table)] = join.block_table
        row, column, block = plan.table_updates
        if len(row):
            self.tables[row, column] = block
        decode, size = slice(0, plan.num_decode), self.block_size
        self.written[self.tables[plan.rows[decode], plan.starts[decode] // size]] = self.clock
        for entry in range(plan.num_decode, len(plan.rows)):
            first, last = plan.starts[entry] // size, (plan.starts[entry] + plan.query_lens[entry] - 1) // size
            self.written[self.tables[plan.rows[entry], first : last + 1]] = self.clock

    def spoil(self, blocks: list[int]) -> None:
        """Note that these blocks hold nothing that any state up to now may count on."""
        self.clock += 1
        self.written[blocks] = self.clock

    def since(self, clock: int) -> list[int]:
        """The blocks that were written after a time of the clock; all of them after -1."""
        return np.flatnonzero(self.written > clock).tolist()
