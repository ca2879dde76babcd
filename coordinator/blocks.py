"""The numbers of the KV blocks: which are in use, which are free, which hold a prefix worth finding again.

A block number means the same block on every stage. The pool counts references and remembers full blocks by
the hash of everything up to their end; it knows nothing of sequences, steps or stages. When a block's
content may be relied on, and when it may be handed out again, is the scheduler's to say.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from common.errors import OutOfCapacityError, PipeLLMError

_HASH_BYTES = 16  # two prompts must not meet by accident: one user would read another's KV


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Appends to `hashes` the hash of each further full block of `token_ids`.

    The hash of a block covers its own token ids and its parent's hash, so equal hashes mean equal tokens
    from position 0 on. `hashes` holds those of the first `len(hashes)` blocks already.
    """
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else b""
        tokens = array("I", token_ids[start : start + block_size]).tobytes()
        hashes.append(blake2b(parent + tokens, digest_size=_HASH_BYTES).digest())


class BlockPool:
    """`num_blocks` KV blocks of `block_size` tokens.

    A block is unused (no content to keep), held (referenced by at least one holder), or idle: nobody
    references it, but it is registered under a hash, and `lookup` finds it until it is handed out anew, the
    one longest idle first. Unused and idle blocks both count as free.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._unused = list(range(num_blocks - 1, -1, -1))  # a stack, the lowest number on top
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._hashes: dict[int, bytes] = {}
        self._registered: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._unused) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, one reference each. OutOfCapacityError, and nothing taken, if too few are free."""
        if count > self.num_free:
            raise OutOfCapacityError(f"{count} KV blocks are needed, {self.num_free} are free")
        blocks = []
        for _ in range(count):
            if self._unused:
                block = self._unused.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                del self._registered[self._hashes.pop(block)]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The registered blocks of the longest known prefix of a chain of hashes; takes no reference."""
        blocks = []
        for digest in hashes:
            block = self._registered.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count as free now, and would not any more once acquired."""
        return sum(block in self._idle for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, which must be held or idle (as `lookup` returns them)."""
        for block in blocks:
            if not self._references[block]:
                if block not in self._idle:
                    raise PipeLLMError(f"KV block {block} was acquired, but is not held and holds no prefix")
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of a block table; a prefix will be evicted from its end."""
        for block in reversed(blocks):
            if not self._references[block]:
                raise PipeLLMError(f"KV block {block} was released more often than acquired")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hashes:
                self._idle[block] = None
            else:
                self._unused.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Makes a held block's content findable. Where an equal one is known already, that one stays."""
        if digest not in self._registered and block not in self._hashes:
            self._registered[digest] = block
            self._hashes[block] = digest
