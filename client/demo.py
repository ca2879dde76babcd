"""`make demo`: a real model answers a prompt through a coordinator and two stage daemons.

Starts them as separate processes, prints the plan, streams the answer, prints time to first token and
tokens/s, stops everything. Exits 0, or 130 after Ctrl-C; nothing is left running either way.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from client import public_models
from client.events import Delta, Finished, Message
from client.local import LocalMesh
from client.mesh_state import LoadEvent, LoadProgress
from client.tables import plan_lines
from common.errors import PipeLLMError

_STAGES = 2
_QUESTION = "Explain in three sentences why the sky is blue."
_MAX_TOKENS = 128


def main() -> int:
    signal.signal(signal.SIGTERM, _leave)
    try:
        run()
    except PipeLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped")
        return 130
    return 0


def run() -> None:
    """The demo itself. Raises PipeLLMError when something fails."""
    path = public_models.fetch("smollm2")
    print(f"{path.name}: a coordinator and {_STAGES} stages start as separate processes", flush=True)
    started_at = time.monotonic()
    with LocalMesh(path, stages=_STAGES, on_event=_Phases()) as mesh:
        print(f"ready after {time.monotonic() - started_at:.1f} s. The plan:")
        for line in plan_lines(mesh.plan):
            print(f"  {line}")
        print(f"\n> {_QUESTION}\n", flush=True)
        _answer(mesh)
    print("all daemons have stopped")


def _answer(mesh: LocalMesh) -> None:
    sent_at = time.monotonic()
    first_at = 0.0
    messages = [Message("user", _QUESTION)]
    with mesh.client.chat(messages, max_tokens=_MAX_TOKENS, temperature=0.0) as events:
        for event in events:
            if isinstance(event, Delta):
                first_at = first_at or time.monotonic()
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                print(
                    f"\n\ntime to first token {first_at - sent_at:.2f} s "
                    f"({event.prompt_tokens} prompt tokens), then {event.decode_tokens_per_s:.1f} tokens/s "
                    f"({event.generated_tokens} tokens)"
                )


class _Phases:
    """Prints each phase of the start once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, event: LoadEvent) -> None:
        if isinstance(event, LoadProgress) and event.phase != self._last:
            self._last = event.phase
            print(f"  {event.phase} ...", flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
