"""What a step costs on a GPU, kernel by kernel and layer by layer, by CUDA events inside a captured graph.

There nothing waits for the host, so that what lies between two events is the device's own time. Kernels are
timed without programmatic launches: each then includes its own filling and draining of the chip, and their
sum can exceed the time of the same step as the stage replays it, where one's start overlaps the other's end.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType

from stage.backends.base import make_batch
from stage.backends.cuda.arguments import LinearArgs
from stage.backends.cuda.backend import CudaBackend
from stage.backends.cuda.decode import StepRows
from stage.backends.cuda.forward import Rows, context_bucket
from stage.backends.cuda.launch import Arguments, Kernels
from stage.backends.cuda.rates import capture
from stage.backends.cuda.repack import TILE_BYTES, TILE_COLUMNS, TILE_ROWS
from stage.backends.cuda.sampling import MAX_STEPS, RowSampler
from stage.backends.timing import BLOCK_SIZE, Model, Phase, Span, merged
from stage.sampler import SamplingOptions

_REPLAYS = 20  # at most MAX_STEPS less the few that come before
_EMPTY_SPANS = 8
_BETWEEN = "between the kernels: cuBLAS, torch, gaps"
_GREEDY = SamplingOptions(
    temperature=0, top_k=0, top_p=1, min_p=0, typical_p=1, repeat_penalty=1, repeat_last_n=0,
    presence_penalty=0, frequency_penalty=0, seed=0,
)  # fmt: skip

Mark = Callable[[], None]


@torch.inference_mode()
def decode_phase(model: Model, depth: int) -> Phase:
    """One row after `depth` tokens, with the choice of the next token, as a whole model's stage decodes."""
    step = _DecodeStep(model, depth)
    step()  # compiled, loaded, buffers made
    eager_s = min(_wall_s(step, 5) for _ in range(4))
    with _capturing(step.backend.kernels, programmatic=True):
        graph = capture(step)
    step.restart()
    seconds, issue_s = _replay_s(graph)
    part_bytes = model.part_bytes(1, depth)
    kernels = _kernel_times(step, step.restart)
    return Phase(
        tokens=1,
        depth=depth,
        seconds=seconds,
        bytes=sum(part_bytes),
        flops=model.flops(1, depth),
        parts=_part_times(step, model, part_bytes, step.restart),
        eager_s=eager_s,
        issue_s=issue_s,
        kernels=_with_attention_bytes(
            kernels, sum(model.kv_bytes(i, depth) for i in range(len(model.layers)))
        ),
        num_launches=sum(span.calls for span in kernels if span.name != _BETWEEN),
    )


@torch.inference_mode()
def prefill_phase(model: Model, tokens: int, depth: int = 0) -> Phase:
    """A chunk of `tokens` rows after `depth` tokens, to the logits of its last."""
    step = _PrefillStep(model, tokens, depth)
    step()
    seconds = min(_wall_s(step, 1) for _ in range(5))
    part_bytes = model.part_bytes(tokens, depth)
    kernels = _kernel_times(step, lambda: None)
    return Phase(
        tokens=tokens,
        depth=depth,
        seconds=seconds,
        bytes=sum(part_bytes),
        flops=model.flops(tokens, depth),
        parts=_part_times(step, model, part_bytes, lambda: None),
        kernels=kernels,
        num_launches=sum(span.calls for span in kernels if span.name != _BETWEEN),
    )


def _replay_s(graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """The device's seconds for a replay, one behind the other, and the host's to issue it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    issued = time.perf_counter()
    for _ in range(_REPLAYS):
        graph.replay()
    issue_s = (time.perf_counter() - issued) / _REPLAYS
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _REPLAYS, issue_s


class _DecodeStep:
    """A decode step on tensors that lie still, for capture. `mark` is called after each part."""

    def __init__(self, model: Model, depth: int) -> None:
        assert isinstance(model.backend, CudaBackend)
        self.backend, self._model, self._depth = model.backend, model, depth
        device = self.backend.device
        longest = depth + MAX_STEPS + 1
        self._context = context_bucket(depth + 1)
        self._rows = StepRows(model.kv, longest, device)
        self._rows.place([model.block_table], 1)
        self._sampler = RowSampler(self.backend.kernels, model.spec.vocab_size, longest)
        self._tokens = model.random_tokens(depth + 1).tolist()
        self.restart()

    def restart(self) -> None:
        """At most MAX_STEPS steps may follow."""
        self._sampler.place([_GREEDY], [self._tokens], [self._depth], 1)
        self._sampler.begin()
        torch.cuda.synchronize(self.backend.device)

    def __call__(self, mark: Mark = lambda: None) -> None:
        forward, model = self.backend.forward, self._model
        rows = self._rows.rows(self._sampler.positions, 1, self._context)
        hidden_states = forward.embed(model.embedding, self._sampler.tokens[:1])
        mark()
        operand = None
        for index, layer in enumerate(model.layers):
            following = model.layers[index + 1] if index + 1 < len(model.layers) else model.head
            operand = forward.layer(layer, model.kv, rows, hidden_states, operand, following.norm)
            mark()
        self._sampler.launch(forward.logits(model.head, hidden_states, operand), self._sampler.method)
        mark()


class _PrefillStep:
    def __init__(self, model: Model, tokens: int, depth: int) -> None:
        assert isinstance(model.backend, CudaBackend)
        self.backend, self._model = model.backend, model
        self._tokens = torch.from_numpy(model.random_tokens(tokens)).to(self.backend.device)
        batch = make_batch([(depth, tokens, model.block_table)], BLOCK_SIZE)
        self._rows = Rows.of(batch, self.backend.device)

    def __call__(self, mark: Mark = lambda: None) -> None:
        forward, model = self.backend.forward, self._model
        hidden_states = forward.embed(model.embedding, self._tokens)
        mark()
        for layer in model.layers:
            forward.layer(layer, model.kv, self._rows, hidden_states)
            mark()
        forward.logits(model.head, hidden_states[-1:].contiguous())
        mark()


_Step = _DecodeStep | _PrefillStep


def _part_times(
    step: _Step, model: Model, part_bytes: Sequence[int], restart: Callable[[], None]
) -> tuple[Span, ...]:
    marks: list[torch.cuda.Event] = []

    def marked() -> None:
        _mark(marks)
        step(lambda: _mark(marks))

    with _capturing(step.backend.kernels, programmatic=True):
        graph = capture(marked)
    pairs = list(itertools.pairwise(marks))
    seconds = _replayed(graph, pairs, restart)
    names = model.part_names()
    return tuple(Span(n, 1, s, b) for n, s, b in zip(names, seconds, part_bytes, strict=True))


def _kernel_times(step: _Step, restart: Callable[[], None]) -> tuple[Span, ...]:
    """Spans by kernel and shape, the longest first, less what two events in a row take."""
    recorder = _Recorder()
    empty: list[torch.cuda.Event] = []

    def observed() -> None:
        for _ in range(_EMPTY_SPANS + 1):
            _mark(empty)
        step()

    with _capturing(step.backend.kernels, programmatic=False):
        step.backend.kernels.observer = recorder
        try:
            graph = capture(observed)
        finally:
            step.backend.kernels.observer = None
    gaps = [(end, start) for (_, end), (start, _) in itertools.pairwise(recorder.events)]
    pairs = [*itertools.pairwise(empty), *recorder.events, *gaps]
    seconds = _replayed(graph, pairs, restart)
    nothing = statistics.median(seconds[:_EMPTY_SPANS])
    times = [max(0.0, one - nothing) for one in seconds[_EMPTY_SPANS:]]
    spans = [
        Span(name, 1, time_s, size) for (name, size), time_s in zip(recorder.launches, times, strict=False)
    ]
    spans += [Span(_BETWEEN, 1, time_s, 0) for time_s in times[len(spans) :] if time_s > 0]
    return merged(spans)


class _Recorder:
    """A LaunchObserver that puts an event on either side of each launch."""

    def __init__(self) -> None:
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.launches: list[tuple[str, int]] = []  # name with shape, bytes of weights read
        self._marks: list[torch.cuda.Event] = []

    def before(self) -> None:
        _mark(self._marks)

    def after(self, expression: str, grid: tuple[int, int, int], args: Arguments) -> None:
        _mark(self._marks)
        self.events.append((self._marks[-2], self._marks[-1]))
        self.launches.append(describe(expression, args))


def describe(expression: str, args: Arguments) -> tuple[str, int]:
    """A launch by kernel and shape, and the bytes of weights it reads (0 where it is no product)."""
    for part in args if isinstance(args, tuple) else (args,):
        if isinstance(part, LinearArgs):
            types = re.findall(r"\w+", expression.partition("<")[2])[:2]
            tile_bytes = [TILE_BYTES[GGMLType[name]] for name in types]
            tiles = list(part.row_tiles)
            experts = part.num_tokens if part.experts else 1  # each token reads its own
            size = sum(n * part.column_tiles * each for n, each in zip(tiles, tile_bytes, strict=True))
            shape = f"{sum(tiles) * TILE_ROWS} x {part.column_tiles * TILE_COLUMNS}"
            return f"{expression} {shape}", size * experts
    return expression, 0


def _with_attention_bytes(kernels: Sequence[Span], kv_bytes: int) -> tuple[Span, ...]:
    """Decode attention reads the cache: shared over its kernels by their time."""
    attention = [span for span in kernels if "attention" in span.name]
    total_s = sum(span.seconds for span in attention)
    return tuple(
        Span(span.name, span.calls, span.seconds, int(kv_bytes * span.seconds / total_s))
        if span in attention and total_s
        else span
        for span in kernels
    )


def _mark(marks: list[torch.cuda.Event]) -> None:
    event = torch.cuda.Event(enable_timing=True, external=True)  # a node of its own in a captured graph
    event.record()
    marks.append(event)


def _replayed(
    graph: torch.cuda.CUDAGraph,
    pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]],
    restart: Callable[[], None],
) -> list[float]:
    """The median seconds between each pair of events, over replays."""
    restart()
    graph.replay()
    runs = np.empty((_REPLAYS, len(pairs)))
    for run in runs:
        graph.replay()
        torch.cuda.synchronize()
        run[:] = [start.elapsed_time(end) / 1e3 for start, end in pairs]
    medians: list[float] = np.median(runs, axis=0).tolist()
    return medians


@contextmanager
def _capturing(kernels: Kernels, programmatic: bool) -> Iterator[None]:
    """With or without programmatic launches. Events between them would make these meaningless."""
    torch.cuda.synchronize(kernels.device)
    before = kernels.programmatic
    kernels.programmatic = before and programmatic
    try:
        yield
    finally:
        kernels.programmatic = before


def _wall_s(run: Callable[[], object], repeats: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats
