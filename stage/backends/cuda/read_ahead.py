"""Layers beyond the pinned pool: read from the files into a ring of pinned slots, in the order of their use.

Only as many layers are read ahead as the ring has slots, each slot again as soon as its copy to the GPU is
done: what is read is used before anything else is read over it. Reading is direct (past the page cache) where
the files are larger than the memory that is free, because the cache would then evict what is needed next.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import CorruptDataError, PipeLLMError
from common.log import get_logger
from stage.backends.cuda.host_pool import PAGE, BlobLayout
from stage.weights.paging import open_all

_PIECE_BYTES = 8 << 20
_READERS = 4


class ReadAhead:
    """`request` names layers in the order of their use; `take` gives them in that order; `give_back` frees
    the slot of the one taken longest ago. One thread uses it; another one reads."""

    def __init__(self, layouts: Mapping[int, BlobLayout], slots: Sequence[np.ndarray], direct: bool) -> None:
        """`slots`: uint8, pinned, each as large as the largest layer."""
        self._layouts = layouts
        paths = {tensor.path for layout in layouts.values() for tensor in layout.tensors.values()}
        self.direct = direct and _takes_direct_reads(paths)
        self._files = open_all(paths, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-ahead")
        self._slots = list(slots)
        self._free: deque[tuple[int, Any]] = deque((slot, None) for slot in range(len(slots)))
        self._wanted: deque[int] = deque()
        self._read: deque[tuple[int, int]] = deque()  # (layer, slot), read
        self._taken: deque[int] = deque()  # slots
        self._generation = 0  # goes up when what was requested is no longer wanted
        self._error: PipeLLMError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no thread is to be had
            self._close_files()
            raise

    def request(self, layer: int) -> None:
        with self._changed:
            self._wanted.append(layer)
            self._changed.notify_all()

    def take(self, layer: int, wait: bool) -> np.ndarray | None:
        """The slot with this layer's blob; None where it is not yet read and `wait` is false.

        Raises what reading raised: PipeLLMError."""
        with self._changed:
            while wait and not self._read and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if not self._read:
                return None
            found, slot = self._read.popleft()
            if found != layer:
                raise PipeLLMError(f"read-ahead holds layer {found}, layer {layer} was asked for: a fault")
            self._taken.append(slot)
            return self._slots[slot][: self._layouts[layer].nbytes]

    def give_back(self, copied: Any) -> None:
        """`copied`: the event after which the slot may be written again."""
        with self._changed:
            self._free.append((self._taken.popleft(), copied))
            self._changed.notify_all()

    def forget(self) -> None:
        """Nothing that was requested and not taken is wanted any more."""
        with self._changed:
            self._generation += 1
            self._wanted.clear()
            self._free.extend((slot, None) for _, slot in self._read)
            self._read.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._readers.shutdown()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not (self._wanted and self._free):
                    self._changed.wait()
                if self._closed:
                    return
                layer, (slot, copied) = self._wanted.popleft(), self._free.popleft()
                generation = self._generation
            try:
                if copied is not None:
                    copied.synchronize()
                self._fill(layer, self._slots[slot])
            except Exception as error:  # handed to whoever waits for the layer
                wrapped = (
                    error
                    if isinstance(error, PipeLLMError)
                    else PipeLLMError(f"reading layer {layer} from its file failed: {error}")
                )
                with self._changed:
                    self._error = wrapped
                    self._changed.notify_all()
                return
            with self._changed:
                if generation == self._generation:
                    self._read.append((layer, slot))
                else:
                    self._free.append((slot, None))
                self._changed.notify_all()

    def _fill(self, layer: int, slot: np.ndarray) -> None:
        pieces = []
        for tensor in self._layouts[layer].tensors.values():
            first = tensor.file_offset // PAGE * PAGE
            into = tensor.offset // PAGE * PAGE
            end = -(-(tensor.file_offset + tensor.nbytes) // PAGE) * PAGE
            needed = tensor.file_offset + tensor.nbytes
            for start in range(first, end, _PIECE_BYTES):
                size = min(_PIECE_BYTES, end - start)
                view = memoryview(slot.data)[into + start - first : into + start - first + size]
                pieces.append((tensor.path, start, view, min(size, needed - start)))
        for done in [self._readers.submit(self._read_piece, *piece) for piece in pieces]:
            done.result()

    def _read_piece(self, path: Path, offset: int, view: memoryview, needed: int) -> None:
        """At least the first `needed` bytes of `view`: a file may end within its last page."""
        done = 0
        while done < needed:
            count = os.preadv(self._files[path], [view[done:]], offset + done)
            if count <= 0:
                raise CorruptDataError(
                    f"{path}: ends at byte {offset + done}, within a tensor: it was cut while in use"
                )
            done += count


def _takes_direct_reads(paths: Iterable[Path]) -> bool:
    """Some file systems know none; then the page cache has to do."""
    try:
        for path in paths:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        get_logger().warning("no_direct_reads", reason=str(error), cost="the page cache is read through")
        return False
    return True
