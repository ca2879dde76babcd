"""`pipellm-stage verify MODEL [--text FILE] [--soak N]`: whether a backend computes what the file means.

With a text, windows of it go through the backend and through the reference; compared are the next-token
distributions at every position (KL divergence of the backend's from the reference's, and whether the most
likely token is the same) and the hidden states after each layer.

The soak (see stage/soak.py) plays a random life of N forwards several ways that must agree in every bit:
again, without CUDA graphs, and with delays injected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.arguments import at_least, whole_number
from common.errors import InvalidRequestError, PipeLLMError
from common.gguf.reader import GGUFFile
from common.gguf.tokenizer import Tokenizer
from stage import soak
from stage.backends.base import Backend, make_batch
from stage.backends.choose import backend_factory
from stage.backends.cuda import race_check
from stage.backends.reference import ReferenceBackend
from stage.config import ACCURACIES, BACKENDS, KV_DTYPES, StageConfig
from stage.model.registry import build_spec
from stage.model.spec import ModelSpec, MoeFfnSpec
from stage.placement import Place
from stage.runner import Runner
from stage.soak import Difference, Schedule

_BLOCK_SIZE = 16
_HEAD_ROWS = 64  # rows whose logits are held at once: a vocabulary of 150,000 takes 600 kB each


@dataclass(frozen=True)
class Agreement:
    """Over all positions of all windows; KL divergences in nats."""

    backend: str
    positions: int
    mean_kl: float
    max_kl: float
    same_top_token: float  # share of positions
    layer_errors: tuple[float, ...]  # relative RMS difference of the hidden states after each layer


def main(argv: Sequence[str]) -> int:
    """Prints what was compared, as a table or with --json as one line; returns the exit code: 1 where the
    soak's plays differ."""
    parser = argparse.ArgumentParser("pipellm-stage verify", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--text", type=Path, metavar="FILE", help="prose to compare with the reference on")
    some, any_number = at_least(1), at_least(0)
    parser.add_argument("--windows", type=some, default=4, metavar="N", help="of the prose (default: 4)")
    parser.add_argument(
        "--window-tokens", type=some, default=512, metavar="N", help="in a window (default: 512)"
    )
    parser.add_argument(
        "--step-tokens", type=any_number, default=0, metavar="N",
        help="rows a forward; 1: as in decode; 0: all",
    )  # fmt: skip
    parser.add_argument(
        "--soak", type=any_number, metavar="N", help="forwards of the soak (default: 1000, with --text 0)"
    )
    parser.add_argument(
        "--streaming", action="store_true", help="the soak also with layers streamed and on the host (a GPU)"
    )
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of the soak (default: 0)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="cpu, cuda:N, or auto")
    parser.add_argument("--threads", type=any_number, default=0, metavar="N", help="on a CPU; 0: all cores")
    parser.add_argument("--accuracy", choices=ACCURACIES, default="fast")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="f16")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(argv)
    num_forwards = flags.soak if flags.soak is not None else 0 if flags.text else 1000
    report: dict[str, object] = {}
    differences: dict[str, Difference | None] = {}
    try:
        config = StageConfig(
            backend=flags.backend, device=flags.device, threads=flags.threads, accuracy=flags.accuracy,
            kv_dtype=flags.kv_dtype,
        ).checked()  # fmt: skip
        with GGUFFile.open(flags.model) as file:
            if flags.text:
                windows = _windows(file, flags.text, flags.windows, flags.window_tokens)
                agreement = verify(file, backend_factory(config)(), windows, flags.step_tokens)
                report |= asdict(agreement)
                if not flags.json:
                    _print_agreement(agreement)
            if num_forwards > 0:
                schedule, differences = soak_ways(file, config, flags.seed, num_forwards, flags.streaming)
                report["soak"] = {
                    "forwards": schedule.num_iterations,
                    "sequences": schedule.num_sequences,
                } | {way: difference is None for way, difference in differences.items()}
                if not flags.json:
                    _print_soak(schedule, differences)
    except PipeLLMError as error:
        print(f"pipellm-stage verify: {error}", file=sys.stderr)
        return 1
    if flags.json:
        print(json.dumps(report))
    return 1 if any(differences.values()) else 0


def soak_ways(
    file: GGUFFile, config: StageConfig, seed: int, num_forwards: int, streaming: bool = False
) -> tuple[Schedule, dict[str, Difference | None]]:
    """Plays one schedule as a stage would, and each way that must agree: where they first differ.

    `streaming`: also with layers off the GPU. Streamed layers must agree with resident ones, host layers with
    themselves, however streams are delayed."""
    spec = build_spec(file)
    schedule = soak.make_schedule(seed, num_forwards, spec.vocab_size, spec.context_length)

    def play(delays: bool = False, disturbed: bool = False, **settings: Any) -> list[soak.Drawn]:
        backend = backend_factory(replace(config, **settings))()
        backend.check(spec)
        on_cuda.append(backend.name == "cuda")
        loaded = race_check.disturb if disturbed else lambda backend: None
        return soak.play(file, spec, backend, schedule, delays, loaded)

    on_cuda: list[bool] = []
    want = play()
    if streaming and not on_cuda[0]:
        raise InvalidRequestError("--streaming checks a GPU's streams; this stage computes on the CPU")
    plays = {"played again": play(), "with delays": play(delays=True)}
    if on_cuda[0]:
        plays["without graphs"] = play(graphs=False)
    differences = {name: soak.first_difference(want, drawn) for name, drawn in plays.items()}
    if streaming:
        whole = ("streamed", "stream disturbed", "host disturbed"), Place.STREAMED, Place.HOST
        names = "experts streamed", "experts disturbed", "host's experts"
        experts = names, Place.STREAMED_EXPERTS, Place.HOST_EXPERTS
        have_experts = all(isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers)
        for names, stream, host in (whole, experts) if have_experts else (whole,):
            streamed = placement_of(len(spec.layers), (stream, Place.RESIDENT))
            mixed = placement_of(len(spec.layers), (stream, host, Place.RESIDENT))
            for name, drawn in (
                (names[0], play(placement=streamed)),
                (names[1], play(True, True, placement=streamed)),
            ):
                differences[name] = soak.first_difference(want, drawn)
            on_host = play(placement=mixed), play(True, True, placement=mixed)
            differences[names[2]] = soak.first_difference(*on_host)
    return schedule, differences


def placement_of(num_layers: int, turns: Sequence[Place]) -> str:
    """A placement in which these take turns, as the setting says it."""
    return ",".join(f"{layer}={turns[layer % len(turns)].value}" for layer in range(num_layers))


def _print_agreement(agreement: Agreement) -> None:
    print(f"backend {agreement.backend}, {agreement.positions} positions against the float32 reference")
    print(f"  KL divergence     mean {agreement.mean_kl:.2e}, largest {agreement.max_kl:.2e}")
    print(f"  same top token    {agreement.same_top_token:.2%}")
    for layer, difference in enumerate(agreement.layer_errors):
        print(f"  after layer {layer:<5} {difference:.1e}")


def _print_soak(schedule: Schedule, differences: dict[str, Difference | None]) -> None:
    print(f"soak of {schedule.num_iterations} forwards, {schedule.num_sequences} sequences")
    for way, difference in differences.items():
        if difference is None:
            print(f"  {way:<17} the same in every bit")
            continue
        sequence, position, *one = difference.one
        other = difference.other[2:]
        print(
            f"  {way:<17} DIFFERS first in sequence {sequence} at position {position}: {one}, {list(other)}"
        )


@torch.inference_mode()
def verify(file: GGUFFile, backend: Backend, windows: Sequence[np.ndarray], step_tokens: int) -> Agreement:
    """Compares `backend` with the reference. windows: int32 token ids; `step_tokens`: rows a forward (0:
    all of a window). Closes the backend."""
    spec = build_spec(file)
    backend.check(spec)
    longest = max(len(window) for window in windows)
    under_test = _Model(file, spec, backend, longest)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the CPU backend leaves torch one
    reference = _Model(file, spec, ReferenceBackend(), longest)
    divergences: list[torch.Tensor] = []
    same = 0
    differences = np.zeros((len(spec.layers), 2))
    for window in windows:
        ours = under_test.hidden_states(window, step_tokens)
        theirs = reference.hidden_states(window, 0)
        for layer, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            differences[layer] += float((one - other).square().sum()), float(other.square().sum())
        for start in range(0, len(window), _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            logits, expected = under_test.logits(ours[-1][rows]), reference.logits(theirs[-1][rows])
            same += int((logits.argmax(-1) == expected.argmax(-1)).sum())
            divergences.append(_kl(expected, logits))
    under_test.close()
    reference.close()
    kl = torch.cat(divergences)
    return Agreement(
        backend=backend.name,
        positions=len(kl),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        same_top_token=same / len(kl),
        layer_errors=tuple(np.sqrt(differences[:, 0] / differences[:, 1]).tolist()),
    )


class _Model:
    """One runner a layer, so that what each layer hands on can be seen."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, backend: Backend, longest: int) -> None:
        self._num_blocks = -(-longest // _BLOCK_SIZE)
        count = len(spec.layers)
        self._runners = [
            Runner.load(
                backend, file, spec, layer, layer + 1, embedding=layer == 0, head=layer == count - 1,
                num_kv_blocks=self._num_blocks, kv_block_size=_BLOCK_SIZE,
            )
            for layer in range(count)
        ]  # fmt: skip

    def hidden_states(self, window: np.ndarray, step_tokens: int) -> list[torch.Tensor]:
        """After each layer: float32 [len(window), hidden_size], on the CPU."""
        rows = step_tokens or len(window)
        steps = [list(self._step(window, start, rows)) for start in range(0, len(window), rows)]
        return [torch.cat(parts) for parts in zip(*steps, strict=True)]

    def _step(self, window: np.ndarray, start: int, step_tokens: int) -> Iterator[torch.Tensor]:
        inputs: np.ndarray | torch.Tensor = window[start : start + step_tokens]
        batch = make_batch([(start, len(inputs), np.arange(self._num_blocks, dtype=np.int32))], _BLOCK_SIZE)
        for runner in self._runners:
            inputs = runner.forward(batch, inputs)
            yield inputs.cpu().clone()  # the next layer may work in place

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._runners[-1].logits(hidden_states, np.arange(len(hidden_states))).cpu()

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


def _kl(expected: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(expected || logits) of each row's softmax, in float64: [rows, vocab_size] -> [rows]."""
    log_p = torch.log_softmax(expected.double(), -1)
    log_q = torch.log_softmax(logits.double(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _windows(file: GGUFFile, text: Path, count: int, length: int) -> list[np.ndarray]:
    """The first `count` windows of `length` tokens of a text file, each begun with BOS where the model's
    prompts are."""
    if count < 1 or length < 1:
        raise InvalidRequestError("verify: --windows and --window-tokens must be positive")
    try:
        prose = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"verify: {text}: {error}") from error
    tokenizer = Tokenizer.from_metadata(file.metadata, str(file.paths[0]))
    ids = tokenizer.encode(prose, add_special=False)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    step = length - len(start)
    if step < 1 or len(ids) < count * step:
        needed = f"{count} windows of {length} tokens"
        raise InvalidRequestError(f"verify: {text} has {len(ids)} tokens, too few for {needed}")
    return [np.array(start + ids[i * step : (i + 1) * step], dtype=np.int32) for i in range(count)]
