"""The progress bar of a model being loaded, on stderr; silent where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(_PHASES["start"], total=None)

        def show(event: LoadEvent) -> None:
            if isinstance(event, LoadProgress):
                progress.update(
                    task,
                    description=_PHASES.get(event.phase, event.phase),
                    completed=event.bytes_done,
                    total=event.bytes_total or None,
                )

        yield show
