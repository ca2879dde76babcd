"""How many steps a second the scheduler issues and books, with the mesh answering at once.

    python -m benchmarks.scheduler [--sequences N] [--stages N] [--repeat N] [--seconds S]

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

from coordinator.scheduler import Scheduler, SchedulerConfig
from coordinator.sequence import Sequence
from protos import stage_pb2

_PROMPT_TOKENS = 512
_ANSWER_TOKENS = 256


def answer(step: stage_pb2.Step) -> list[stage_pb2.StepResult]:
    """What the last stage would send for a step: token 7 everywhere."""
    results = []
    for repeat in range(step.repeat):
        result = stage_pb2.StepResult(step_id=step.step_id, repeat=repeat)
        for item in step.items:
            for position in item.sample_positions:
                result.tokens.add(sequence_id=item.sequence_id, position=position + repeat + 1, token_id=7)
        if result.tokens:
            results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1, help="iterations a step; twice that many in flight")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    config = SchedulerConfig(
        num_blocks=args.sequences * 64,
        block_size=16,
        num_groups=args.stages,
        num_stages=args.stages,
        max_step_tokens=512,
        max_sequences=args.sequences,
        max_waiting=args.sequences,
        context_length=4096,
        run_ahead=2 * args.repeat,
        repeat=args.repeat,
    )
    scheduler = Scheduler(config)
    steps = tokens = last_id = 0
    spent_s = 0.0
    while spent_s < args.seconds:
        while scheduler.num_running + scheduler.num_waiting < args.sequences:
            last_id += 1
            prompt = [last_id] * _PROMPT_TOKENS
            scheduler.add(Sequence(last_id, prompt, stage_pb2.ResolvedSampling(), _ANSWER_TOKENS))
        for group in range(config.num_groups):
            began = time.perf_counter()
            step = scheduler.schedule(group)
            spent_s += time.perf_counter() - began
            if step is None:
                continue
            results = answer(step)
            began = time.perf_counter()
            for result in results:
                tokens += len(scheduler.on_result(result))
            for stage in range(config.num_stages):
                scheduler.on_acknowledged(stage, step.step_id)
            spent_s += time.perf_counter() - began
            steps += 1
    per_s, tokens_per_s = steps / spent_s, tokens / spent_s
    print(f"{per_s:,.0f} steps/s, {tokens_per_s:,.0f} tokens/s, {1e6 / per_s:.0f} us a step")
    result = {"benchmark": "scheduler", **vars(args)}
    print(json.dumps(result | {"steps_per_s": round(per_s, 1), "tokens_per_s": round(tokens_per_s, 1)}))


if __name__ == "__main__":
    main()
