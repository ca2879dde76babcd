"""The block pool: references, prefix reuse, eviction, and its own books against a plain model of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import OutOfCapacityError, PipeLLMError
from coordinator.blocks import BlockPool, extend_block_hashes


def chain(token_ids: list[int], block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size)
    return hashes


def filled(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Blocks that hold `token_ids`, allocated and registered."""
    hashes = chain(token_ids, pool.block_size)
    blocks = pool.allocate(len(hashes))
    for block, digest in zip(blocks, hashes, strict=True):
        pool.register(block, digest)
    return blocks


def test_hashes_cover_full_blocks_and_all_that_precedes_them() -> None:
    assert chain([1, 2, 3]) == []
    assert len(chain([1, 2, 3, 4, 5])) == 1
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1]


def test_hashes_extend_to_the_same_chain() -> None:
    tokens = list(range(21))
    hashes: list[bytes] = []
    for length in range(len(tokens) + 1):
        extend_block_hashes(hashes, tokens[:length], 4)
        assert hashes == chain(tokens[:length])
    assert len(hashes) == 5


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(4, 4)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    with pytest.raises(OutOfCapacityError, match="2 KV blocks are needed, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_released_prefix_is_found_again() -> None:
    pool = BlockPool(4, 4)
    tokens = list(range(8))
    blocks = filled(pool, tokens)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.lookup(chain([*tokens, 99, 98, 97, 96])) == blocks
    assert pool.lookup(chain([*tokens[:4], 99, 98, 97, 96])) == blocks[:1]
    assert pool.num_idle(blocks) == 2
    pool.acquire(blocks)
    assert pool.num_free == 2
    assert pool.num_idle(blocks) == 0


def test_shared_block_returns_with_its_last_reference() -> None:
    pool = BlockPool(2, 4)
    blocks = filled(pool, list(range(4)))
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_unused_blocks_go_first_then_the_longest_idle_and_a_prefix_from_its_end() -> None:
    pool = BlockPool(5, 4)
    old, new = list(range(8)), list(range(100, 108))
    old_blocks, new_blocks = filled(pool, old), filled(pool, new)
    pool.release(old_blocks)
    pool.release(new_blocks)
    pool.allocate(1)
    assert pool.lookup(chain(old)) == old_blocks
    pool.allocate(1)
    assert pool.lookup(chain(old)) == old_blocks[:1]
    pool.allocate(1)
    assert pool.lookup(chain(old)) == []
    assert pool.lookup(chain(new)) == new_blocks


def test_an_evicted_block_forgets_its_content() -> None:
    pool = BlockPool(1, 4)
    pool.release(filled(pool, [1, 2, 3, 4]))
    block = pool.allocate(1)
    assert pool.lookup(chain([1, 2, 3, 4])) == []
    pool.release(block)
    assert pool.lookup(chain([1, 2, 3, 4])) == []


def test_the_first_of_two_equal_blocks_stays_registered() -> None:
    pool = BlockPool(2, 4)
    first, second = filled(pool, [1, 2, 3, 4]), filled(pool, [1, 2, 3, 4])
    assert pool.lookup(chain([1, 2, 3, 4])) == first
    pool.release(second)
    pool.release(first)
    assert pool.lookup(chain([1, 2, 3, 4])) == first


def test_broken_books_are_an_error() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(PipeLLMError, match="released more often"):
        pool.release(blocks)
    with pytest.raises(PipeLLMError, match="holds no prefix"):
        pool.acquire(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Holders with block tables come and go; what each block holds is tracked beside the pool."""

    NUM_BLOCKS, BLOCK_SIZE = 6, 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # tokens from position 0 to the block's end

    @rule(tokens=st.lists(st.integers(0, 1), max_size=8))
    def start(self, tokens: list[int]) -> None:
        hashes = chain(tokens, self.BLOCK_SIZE)
        table = self.pool.lookup(hashes)
        for index, block in enumerate(table):
            assert self.content[block] == tuple(tokens[: (index + 1) * self.BLOCK_SIZE])
        count = len(hashes) - len(table)
        if count > self.pool.num_free - self.pool.num_idle(table):
            return
        self.pool.acquire(table)
        fresh = self.pool.allocate(count)
        held = {block for other in self.tables for block in other}
        assert not held & set(fresh)
        table = table + fresh
        for index, block in enumerate(table):
            self.content[block] = tuple(tokens[: (index + 1) * self.BLOCK_SIZE])
            self.pool.register(block, hashes[index])
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        held = {block for table in self.tables for block in table}
        assert self.pool.num_free == self.NUM_BLOCKS - len(held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
