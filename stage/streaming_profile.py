"""`pipellm-stage profile MODEL --streaming`: a timeline of one token of a model larger than the GPU's memory.

The model is loaded as a stage would load it, within the memory it is given; some tokens are generated one
after the other, and one of them is looked at: copies, repackings, what the GPU and what the host computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.errors import InvalidRequestError
from common.gguf.reader import GGUFFile
from common.svg_timeline import timeline
from stage.backends import timeline as times
from stage.backends.base import Backend, DecodeRow
from stage.device import device_info
from stage.model.registry import build_spec
from stage.placement import describe
from stage.runner import Runner
from stage.sampler import SamplingOptions

_BLOCK_SIZE = 32
_WARM_STEPS, _STEPS, _LOOKED_AT = 8, 4, 2  # the first of the recorded ones begins with nothing under way
_GREEDY = SamplingOptions(
    temperature=0, top_k=0, top_p=1, min_p=0, typical_p=1, repeat_penalty=1, repeat_last_n=0,
    presence_penalty=0, frequency_penalty=0, seed=0,
)  # fmt: skip


@dataclass(frozen=True)
class StreamingProfile:
    model: str
    device: str
    placement: str
    depth: int
    report: times.Report

    def as_dict(self) -> dict[str, Any]:
        named = {"model": self.model, "device": self.device, "placement": self.placement, "depth": self.depth}
        return named | times.as_dict(self.report)


@torch.inference_mode()
def profile(file: GGUFFile, backend: Backend, depth: int) -> StreamingProfile:
    """Loads the whole model on `backend`, records a token after `depth` of them, and closes the backend.

    Raises InvalidRequestError where nothing is streamed, or for a depth that the model has not;
    OutOfCapacityError where it does not fit at all."""
    try:
        if backend.name != "cuda":
            raise InvalidRequestError(
                f"profile: --streaming looks at a GPU's streams; the {backend.name} backend has none"
            )
        from stage.backends.cuda.placing import link_rate
        from stage.backends.cuda.stream_recording import StreamRecording

        spec = build_spec(file)
        room = _WARM_STEPS + _STEPS
        if not 0 <= depth <= spec.context_length - room:
            most = spec.context_length - room
            raise InvalidRequestError(f"profile: --depth is {depth}, expected are 0 to {most} tokens")
        backend.check(spec)
        device = device_info(backend).name
        max_link_bytes_per_s = link_rate(backend.device)
        num_blocks = -(-(depth + room) // _BLOCK_SIZE)
        runner = Runner.load(
            backend, file, spec, 0, len(spec.layers), embedding=True, head=True,
            num_kv_blocks=num_blocks, kv_block_size=_BLOCK_SIZE,
        )  # fmt: skip
        offloaded, placement, decoder = backend.offloaded, backend.placement, runner.decoder  # type: ignore[attr-defined]
        if offloaded is None or placement is None or decoder is None:
            raise InvalidRequestError(
                "profile: all layers fit into the GPU's memory and none is streamed; "
                "give it less with --gpu-memory, or say with --placement which layers to stream"
            )
        ids = np.random.default_rng(0).integers(0, spec.vocab_size, depth + room).tolist()
        blocks = np.arange(num_blocks, dtype=np.int32)
        decoder.issue([DecodeRow(0, depth, ids[: depth + 1], blocks, _GREEDY)], room).wait()
        torch.cuda.synchronize(backend.device)
        recording = StreamRecording(offloaded)
        recording.begin()
        try:
            start = depth + _WARM_STEPS  # whose graphs have been captured: the last ones again
            row = DecodeRow(0, start, ids[: start + 1], blocks, _GREEDY)
            decoder.issue([row], _STEPS).wait()
            torch.cuda.synchronize(backend.device)
        finally:
            recording.end()
        starts = recording.step_starts()
        report = times.analyse(
            recording.activities(), starts[_LOOKED_AT], starts[_LOOKED_AT + 1], max_link_bytes_per_s
        )
        return StreamingProfile(file.paths[0].name, device, describe(placement), depth, report)
    finally:
        backend.close()


def lines(measured: StreamingProfile) -> Iterator[str]:
    """The profile for people."""
    yield f"{measured.model} on {measured.device}, after {measured.depth} tokens: {measured.placement}"
    yield from times.lines(measured.report)


def chart(measured: StreamingProfile) -> str:
    """The timeline as an SVG."""
    report = measured.report
    title = f"One token of {measured.model} on {measured.device}"
    notes = [measured.placement, *times.lines(report)]
    return timeline(title, times.LANES, times.blocks(report), report.seconds * 1e3, "ms", notes)
