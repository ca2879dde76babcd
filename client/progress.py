"""The progress bar of a model being loaded, on stderr; silent where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from client.mesh_state import LoadEvent, LoadProgress

_PHASES = {
    "start": "starting the daemons",
    "measure": "measuring the stages",
    "load": "loading",
    "link": "linking the stages",
    "check": "checking the mesh",
}


@contextmanager
def load_progress() -> Iterator[Callable[[LoadEvent], None]]:
    """Shows the events handed to the callable it yields; the bar is gone afterwards."""
    console = Console(stderr=True)
    words, amount = TextColumn("{task.description}"), TextColumn("{task.fields[amount]}")
    columns = (SpinnerColumn(), words, BarColumn(), amount)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(_PHASES["start"], total=None, amount="")

        def show(event: LoadEvent) -> None:
            if isinstance(event, LoadProgress):
                done, total = event.bytes_done, event.bytes_total
                progress.update(
                    task,
                    description=_PHASES.get(event.phase, event.phase),
                    completed=done,
                    total=total or None,  # without one the bar only moves
                    amount=f"{done >> 20} of {total >> 20} MiB" if total else "",
                )

        yield show
