"""`pipellm-stage profile MODEL`: where the time of a decode step and of a prefill goes on this device.

On a GPU by CUDA events, kernel by kernel and layer by layer; elsewhere by the host's clock, layer by layer.
The memory's read rate is measured in the same run, so that shares of it speak of this machine at this moment.
With --streaming, a timeline of one token of a model whose weights are streamed (streaming_profile.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.arguments import at_least, whole_number
from common.errors import InvalidRequestError, PipeLLMError
from common.gguf.reader import GGUFFile
from common.svg_chart import Bar, bar_chart
from stage import streaming_profile
from stage.backends import timeline
from stage.backends.base import Backend
from stage.backends.choose import backend_factory
from stage.backends.timing import Model, Phase, Span, host_phase, torch_read_rate
from stage.config import ACCURACIES, BACKENDS, KV_DTYPES, StageConfig
from stage.device import device_info
from stage.model.registry import build_spec

_MAX_STEP_TOKENS = 2048
_HOST_REPEATS = 5
_ROOM = 64  # tokens generated while measuring, beyond the depth


@dataclass(frozen=True)
class Profile:
    model: str
    architecture: str
    backend: str
    device: str
    num_layers: int
    weight_bytes: int
    read_bytes_per_s: float
    decode: Phase
    prefill: Phase

    def as_dict(self) -> dict[str, Any]:
        """What --json prints: the fields, and what follows from them."""
        result = asdict(self)
        for name, phase in (("decode", self.decode), ("prefill", self.prefill)):
            result[name] |= {
                "tokens_per_s": phase.tokens / phase.seconds,
                "bytes_per_s": phase.bytes / phase.seconds,
                "flop_per_s": phase.flops / phase.seconds,
            }
            if phase.kernels:
                result[name] |= {"kernel_s": phase.kernel_s, "not_kernel_s": phase.seconds - phase.kernel_s}
        if self.decode.eager_s is not None:
            result["decode"]["launch_s"] = self.decode.eager_s - self.decode.seconds
        return result


def main(argv: Sequence[str]) -> int:
    """Prints the profile, as tables or with --json as one line; returns the exit code."""
    parser = argparse.ArgumentParser("pipellm-stage profile", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument(
        "--prompt", type=whole_number, default=512, metavar="N", help="rows of the prefill (default: 512)"
    )
    parser.add_argument(
        "--depth", type=whole_number, default=512, metavar="N",
        help="context before the decode step (default: 512)",
    )  # fmt: skip
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="cpu, cuda:N, or auto")
    parser.add_argument(
        "--threads", type=at_least(0), default=0, metavar="N", help="on a CPU; 0: all cores"
    )
    parser.add_argument("--accuracy", choices=ACCURACIES, default="fast")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="f16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a chart of it")
    streaming = parser.add_argument_group("a model larger than the GPU's memory")
    streaming.add_argument("--streaming", action="store_true", help="a timeline of one token instead")
    streaming.add_argument("--trace", type=Path, metavar="FILE", help="the timeline as a Chrome trace")
    for name in ("gpu-memory", "host-memory", "pinned-memory", "placement"):
        metavar = "AMOUNT" if name.endswith("memory") else "LAYERS"
        streaming.add_argument(f"--{name}", default="auto", metavar=metavar, help="as the stage's setting")
    flags = parser.parse_args(argv)
    try:
        config = StageConfig(
            backend=flags.backend, device=flags.device, threads=flags.threads, accuracy=flags.accuracy,
            kv_dtype=flags.kv_dtype, gpu_memory=flags.gpu_memory, host_memory=flags.host_memory,
            pinned_memory=flags.pinned_memory, placement=flags.placement,
        ).checked()  # fmt: skip
        if flags.streaming:
            return _streaming(flags, config)
        with GGUFFile.open(flags.model) as file:
            measured = profile(file, backend_factory(config)(), flags.prompt, flags.depth)
        if flags.svg:
            _write(flags.svg, chart(measured))
    except PipeLLMError as error:
        print(f"pipellm-stage profile: {error}", file=sys.stderr)
        return 1
    print(json.dumps(measured.as_dict()) if flags.json else "\n".join(lines(measured)))
    return 0


def _streaming(flags: argparse.Namespace, config: StageConfig) -> int:
    with GGUFFile.open(flags.model) as file:
        measured = streaming_profile.profile(file, backend_factory(config)(), flags.depth)
    if flags.svg:
        _write(flags.svg, streaming_profile.chart(measured))
    if flags.trace:
        _write(flags.trace, json.dumps(timeline.chrome_trace(measured.report)))
    as_json = json.dumps(measured.as_dict())
    print(as_json if flags.json else "\n".join(streaming_profile.lines(measured)))
    return 0


def profile(file: GGUFFile, backend: Backend, prompt: int, depth: int) -> Profile:
    """Loads the whole model on `backend`, measures, and closes the backend.

    prompt: rows of the prefill, in one step; depth: tokens in the context of the decode step.
    Raises InvalidRequestError for lengths the model has not, OutOfCapacityError where it does not fit.
    """
    try:
        spec = build_spec(file)
        if not 2 <= prompt <= min(_MAX_STEP_TOKENS, spec.context_length):
            most = min(_MAX_STEP_TOKENS, spec.context_length)
            raise InvalidRequestError(f"profile: --prompt is {prompt}, expected are 2 to {most} tokens")
        if not 0 <= depth <= spec.context_length - _ROOM:
            most = spec.context_length - _ROOM
            raise InvalidRequestError(f"profile: --depth is {depth}, expected are 0 to {most} tokens")
        model = Model(backend, file, spec, max(prompt, depth + _ROOM))
        device = device_info(backend)
        with torch.inference_mode():
            read_rate, prefill, decode = _measure(model, prompt, depth)
        return Profile(
            model=file.paths[0].name,
            architecture=spec.architecture,
            backend=backend.name,
            device=device.name,
            num_layers=len(spec.layers),
            weight_bytes=model.weight_bytes,
            read_bytes_per_s=read_rate,
            decode=decode,
            prefill=prefill,
        )
    finally:
        backend.close()


def _measure(model: Model, prompt: int, depth: int) -> tuple[float, Phase, Phase]:
    """The memory's read rate, prefill, decode."""
    if model.backend.name == "cuda":
        from stage.backends.cuda import profiling, rates

        prefill = profiling.prefill_phase(model, prompt)
        decode = profiling.decode_phase(model, depth)
        return rates.read_bytes_per_s(model.backend.kernels), prefill, decode  # type: ignore[attr-defined]
    if model.backend.name == "cpu":
        from stage.backends.cpu import read_rate

        read_bytes_per_s = read_rate.read_bytes_per_s(model.backend, model.largest_tensors)  # type: ignore[arg-type]
    else:
        read_bytes_per_s = torch_read_rate()
    prefill = host_phase(model, prompt, 0, _HOST_REPEATS)
    return read_bytes_per_s, prefill, host_phase(model, 1, depth, 3 * _HOST_REPEATS)


def lines(measured: Profile) -> Iterator[str]:
    """The profile for people."""
    decode, prefill, rate = measured.decode, measured.prefill, measured.read_bytes_per_s
    yield (
        f"{measured.model}: {measured.architecture}, {measured.num_layers} layers, "
        f"{measured.weight_bytes / 1e9:.2f} GB, on {measured.device} ({measured.backend}), whose memory "
        f"reads at {rate / 1e9:.0f} GB/s"
    )
    yield ""
    as_graph = " as a graph" if decode.eager_s is not None else ""
    yield (
        f"decode, 1 row after {decode.depth} tokens: {_time(decode.seconds)} a token{as_graph} "
        f"({1 / decode.seconds:.1f} tokens/s), {decode.bytes / decode.seconds / 1e9:.1f} GB/s, "
        f"{decode.bytes / decode.seconds / rate:.0%} of the read rate"
    )
    if decode.eager_s is not None and decode.issue_s is not None:
        launch_s = decode.eager_s - decode.seconds
        yield (
            f"  eager {_time(decode.eager_s)}: launching {decode.num_launches} kernels one by one costs "
            f"{_time(launch_s)}, {_time(launch_s / max(1, decode.num_launches))} each; the host issues a "
            f"replay in {_time(decode.issue_s)}"
        )
    yield from _kernel_lines(decode, rate)
    yield from _part_lines(decode, rate)
    yield ""
    yield (
        f"prefill of {prefill.tokens} tokens: {_time(prefill.seconds)} "
        f"({prefill.tokens / prefill.seconds:.0f} tokens/s), "
        f"{prefill.flops / prefill.seconds / 1e12:.2f} TFLOP/s"
    )
    yield from _kernel_lines(prefill, rate)
    yield from _part_lines(prefill, rate)


def _kernel_lines(phase: Phase, rate: float) -> Iterator[str]:
    if not phase.kernels:
        return
    rest = phase.seconds - phase.kernel_s
    overlap = " (below zero: one kernel's start overlaps another's end)" if rest < 0 else ""
    yield f"  kernels, each alone: {_time(phase.kernel_s)}; what is not kernel time: {_time(rest)}{overlap}"
    yield f"  {'':64} {'calls':>6} {'each':>10} {'all':>10} {'share':>6} {'GB/s':>7} {'of rate':>8}"
    for span in phase.kernels:
        moved = f"{span.bytes_per_s / 1e9:7.0f} {span.bytes_per_s / rate:8.0%}" if span.bytes else ""
        yield (
            f"  {span.name:64} {span.calls:6d} {_time(span.seconds / span.calls):>10} "
            f"{_time(span.seconds):>10} {span.seconds / phase.kernel_s:6.1%} {moved}".rstrip()
        )


def _part_lines(phase: Phase, rate: float) -> Iterator[str]:
    """Of a step with many rows only the times: their limit is arithmetic."""
    moves = phase.tokens == 1
    yield f"  {'':12} {'time':>10}" + (f" {'GB/s':>7} {'of rate':>8}" if moves else "")
    for span in phase.parts:
        moved = f" {span.bytes_per_s / 1e9:7.1f} {span.bytes_per_s / rate:8.0%}" if moves else ""
        yield f"  {span.name:12} {_time(span.seconds):>10}{moved}"


def chart(measured: Profile) -> str:
    """The same as an SVG."""
    groups = []
    for name, phase in (("decode", measured.decode), ("prefill", measured.prefill)):
        heading = f"{name}: {_time(phase.seconds)} a step of {phase.tokens} rows after {phase.depth} tokens"
        for what, spans in (("kernels", phase.kernels), ("parts", phase.parts)):
            if spans:
                bars = [_bar(span, measured.read_bytes_per_s) for span in spans]
                groups.append((f"{heading}, {what}", bars))
    title = f"{measured.model} on {measured.device} ({measured.backend})"
    return bar_chart(title, groups)


def _bar(span: Span, rate: float) -> Bar:
    calls = f"{span.calls} x " if span.calls > 1 else ""
    moved = f", {span.bytes_per_s / rate:.0%} of the read rate" if span.bytes else ""
    return Bar(span.name, span.seconds, f"{calls}{_time(span.seconds / span.calls)}{moved}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"profile: cannot write {path}: {error.strerror}") from error
