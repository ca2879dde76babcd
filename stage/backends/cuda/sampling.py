"""Draws tokens on the GPU (kernels/sample.cu), with the meaning of `stage.sampler`.

Owns a fixed set of rows: their options, the earlier tokens that penalties count, and the records of what was
drawn. All of it lies still, so that launches can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from stage.backends.cuda.arguments import GreedyArgs, SampleArgs
from stage.backends.cuda.launch import Kernels
from stage.sampler import UNDRAWABLE, Drawn, SamplingOptions

MAX_ROWS = 64
MAX_STEPS = 64  # records of one launch after another
_MAX_TOP = 20
_RECORD = 2 + 2 * _MAX_TOP
_CHUNKS = 16  # blocks that share a row's search for the largest logit
_THREADS = 1024
_MAX_KEPT = 1024  # candidates a block sorts by itself

# Field for field the kernel's SampleRow.
_ROW = np.dtype(
    [
        ("temperature", "<f8"), ("top_p", "<f8"), ("typical_p", "<f8"), ("log_min_p", "<f8"),
        ("seed", "<u8"), ("bias_ids", "<u8"), ("bias_values", "<u8"),
        ("repeat_penalty", "<f4"), ("presence_penalty", "<f4"), ("frequency_penalty", "<f4"),
        ("num_biases", "<i4"), ("num_kept", "<i4"), ("window", "<i4"), ("num_top", "<i4"),
    ],
    align=True,
)  # fmt: skip


def upload(target: torch.Tensor, array: np.ndarray) -> None:
    """Copies to the device in stream order, without waiting; the pinned source lives as long as it must."""
    source = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
    target.copy_(source, non_blocking=True)


class RowSampler:
    """Up to 64 rows of logits at a time. `place` says what the rows want, `launch` draws for all of them."""

    def __init__(self, kernels: Kernels, vocabulary: int, max_history: int) -> None:
        self._kernels = kernels
        self._vocabulary = vocabulary
        device = kernels.device
        self.tokens = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.positions = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._step = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._records = torch.zeros((MAX_STEPS, MAX_ROWS, _RECORD), dtype=torch.int32, device=device)
        self._partial = torch.zeros((MAX_ROWS, _CHUNKS, 2), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._rows = torch.zeros(MAX_ROWS * _ROW.itemsize, dtype=torch.uint8, device=device)
        self._recent = torch.zeros((MAX_ROWS, max(max_history, 1)), dtype=torch.int32, device=device)
        self._biases: list[torch.Tensor] = []  # kept alive for the rows that point to them
        self._counted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._options: tuple[SamplingOptions, ...] = ()

    @property
    def max_history(self) -> int:
        return int(self._recent.shape[1])

    def sample(
        self,
        logits: torch.Tensor,
        options: Sequence[SamplingOptions],
        histories: Sequence[Sequence[int]],
    ) -> list[Drawn]:
        """One token a row, now: f32 [rows, vocabulary] (overwritten) and what came before each row's draw."""
        num_rows = len(options)
        self.place(options, histories, [len(history) - 1 for history in histories], num_rows)
        self.begin()
        self.launch(logits, self.method)
        records = self.records(1, num_rows)
        torch.cuda.current_stream(self._kernels.device).synchronize()
        return [
            drawn(record, chosen, self._vocabulary)
            for record, chosen in zip(records[0].numpy(), options, strict=True)
        ]

    @property
    def method(self) -> str:
        """Which kernels serve the rows that are placed: "greedy", "sampled", or "sorted"."""
        if all(options.is_plain_greedy for options in self._options):
            return "greedy"
        full = any(_keeps_many(options, self._vocabulary) for options in self._options)
        return "sorted" if full else "sampled"

    def place(
        self,
        options: Sequence[SamplingOptions],
        histories: Sequence[Sequence[int]],
        positions: Sequence[int],
        bucket: int,
    ) -> None:
        """Rows' options; `histories[i]` ends with the token at `positions[i]`, the row that is computed next
        (or was just computed). Rows up to `bucket` are padded."""
        self._options = tuple(options)
        padded = np.zeros((2, bucket), np.int32)
        padded[0, : len(options)] = positions
        padded[1, : len(options)] = [history[-1] for history in histories]
        upload(self.positions[:bucket], padded[0])
        upload(self.tokens[:bucket], padded[1])
        if self.method != "greedy":
            self._place_options(histories, positions, bucket)

    def begin(self) -> None:
        """The next launch writes the first record."""
        self._step.zero_()

    def launch(self, logits: torch.Tensor, method: str) -> None:
        """Draws for the first len(logits) rows, and advances tokens and positions. logits: f32 [rows,
        vocabulary], overwritten. At most 64 launches after `begin`."""
        if method == "greedy":
            self._launch_greedy(logits)
            return
        num_rows = len(logits)
        counts, saved = self._counted_rows(num_rows)
        args = SampleArgs(
            logits=logits.data_ptr(),
            rows=self._rows.data_ptr(),
            tokens=self.tokens.data_ptr(),
            positions=self.positions.data_ptr(),
            recent=self._recent.data_ptr(),
            counts=counts.data_ptr(),
            saved=saved.data_ptr(),
            records=self._records.data_ptr(),
            step=self._step.data_ptr(),
            vocabulary=self._vocabulary,
            recent_stride=self._recent.shape[1],
        )
        grid = (num_rows, 1, 1)
        if method == "sorted":
            self._kernels.launch("sample.cu", "adjust", grid, _THREADS, args)
            values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
            args.sorted, args.sorted_ids = values.data_ptr(), ids.data_ptr()
            self._kernels.launch("sample.cu", "sample<true>", grid, _THREADS, args)
        else:
            self._kernels.launch("sample.cu", "sample<false>", grid, _THREADS, args)

    def records(self, steps: int, bucket: int) -> torch.Tensor:
        """A pinned copy of what the last `steps` launches drew, there once the stream has come so far."""
        source = self._records.view(-1)[: steps * bucket * _RECORD]
        target = torch.empty(source.shape, dtype=torch.int32, pin_memory=True)
        target.copy_(source, non_blocking=True)
        return target.view(steps, bucket, _RECORD)

    def save(self) -> tuple[torch.Tensor, ...]:
        """What a launch changes, for `restore`: a capture's trial run must leave no trace."""
        return tuple(tensor.clone() for tensor in self._changing())

    def restore(self, saved: tuple[torch.Tensor, ...]) -> None:
        for tensor, before in zip(self._changing(), saved, strict=True):
            tensor.copy_(before)

    def _changing(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.positions, self._step, self._records, self._recent

    def _launch_greedy(self, logits: torch.Tensor) -> None:
        args = GreedyArgs(
            logits=logits.data_ptr(),
            tokens=self.tokens.data_ptr(),
            positions=self.positions.data_ptr(),
            records=self._records.data_ptr(),
            step=self._step.data_ptr(),
            partial=self._partial.data_ptr(),
            arrived=self._arrived.data_ptr(),
            vocabulary=self._vocabulary,
        )
        self._kernels.launch("sample.cu", "greedy", (_CHUNKS, len(logits), 1), 256, args)

    def _counted_rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What penalties count in: zeros, and room for the logits they change."""
        if num_rows not in self._counted:
            shape, device = (num_rows, self._vocabulary), self._kernels.device
            counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self._counted[num_rows] = counts, torch.empty(shape, dtype=torch.float32, device=device)
        return self._counted[num_rows]

    def _place_options(
        self, histories: Sequence[Sequence[int]], positions: Sequence[int], bucket: int
    ) -> None:
        rows = np.zeros(bucket, _ROW)
        rows["typical_p"] = rows["top_p"] = rows["repeat_penalty"] = 1.0  # padding is greedy
        rows["log_min_p"], rows["num_kept"], rows["num_top"] = -np.inf, 1, -1
        self._biases = []
        for index, options in enumerate(self._options):
            row = rows[index]
            row["temperature"], row["top_p"], row["seed"] = options.temperature, options.top_p, options.seed
            row["typical_p"] = options.typical_p
            row["log_min_p"] = math.log(options.min_p) if options.min_p > 0 else -np.inf
            row["num_kept"] = min(options.top_k or self._vocabulary, self._vocabulary)
            row["num_top"] = options.top_logprobs if options.logprobs else -1
            self._place_biases(row, options)
            if options.uses_history:
                row["repeat_penalty"] = options.repeat_penalty
                row["presence_penalty"] = options.presence_penalty
                row["frequency_penalty"] = options.frequency_penalty
                end = positions[index] + 1
                row["window"] = min(options.repeat_last_n, self.max_history)
                start = max(0, end - int(row["window"]))
                upload(self._recent[index, start:end], np.asarray(histories[index][start:end], np.int32))
        upload(self._rows[: rows.nbytes], rows.view(np.uint8))

    def _place_biases(self, row: np.void, options: SamplingOptions) -> None:
        biases = [*options.logit_bias, *((token_id, -math.inf) for token_id in options.banned_token_ids)]
        if not biases:
            return
        device = self._kernels.device
        ids = torch.tensor([token_id for token_id, _ in biases], dtype=torch.int32).to(device)
        values = torch.tensor([value for _, value in biases], dtype=torch.float32).to(device)
        self._biases += [ids, values]
        row["bias_ids"], row["bias_values"], row["num_biases"] = (
            ids.data_ptr(),
            values.data_ptr(),
            len(biases),
        )


def _keeps_many(options: SamplingOptions, vocabulary: int) -> bool:
    kept = min(options.top_k or vocabulary, vocabulary)
    return options.temperature > 0 and kept > _MAX_KEPT


def drawn(record: np.ndarray, options: SamplingOptions, vocabulary: int) -> Drawn:
    """What one record (int32 [42]) says. Its token is no token where the logits were not numbers."""
    token_id = int(record[0])
    if not 0 <= token_id < vocabulary:
        return UNDRAWABLE
    if not options.logprobs:
        return Drawn(token_id)
    floats = record.view(np.float32)
    pairs = zip(record[2 : 2 + options.top_logprobs].tolist(), floats[2 + _MAX_TOP :].tolist(), strict=False)
    return Drawn(token_id, float(floats[1]), [pair for pair in pairs if pair[0] >= 0])
