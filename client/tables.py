"""Models, plan and status as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from client.mesh_state import Model, Plan, Stage, Status


def print_models(models: Sequence[Model]) -> None:
    table = _table("model", "architecture", "type", ">size", ">layers", ">context", "")
    for model in models:
        state = "loaded" if model.loaded else model.problem
        table.add_row(
            Text(model.name),
            Text(model.architecture),
            Text(model.quantization),
            _bytes(model.file_bytes),
            str(model.num_layers),
            str(model.context_length),
            Text(state),
        )
    _console().print(table if models else "no models")


def print_plan(plan: Plan) -> None:
    _console().print(_plan_table(plan))


def print_status(status: Status) -> None:
    _console().print(_status(status))


def watch_status(states: Iterable[Status]) -> None:
    """Redraws until the states end or Ctrl-C; off a terminal, prints one after the other."""
    console = _console()
    if not console.is_terminal:
        for state in states:
            console.print(_status(state), "")
            console.file.flush()
        return
    with Live(console=console, auto_refresh=False) as live:
        for state in states:
            live.update(_status(state), refresh=True)


def plan_lines(plan: Plan) -> list[str]:
    """The plan in plain lines: which stage has which layers."""
    return [
        f"{window.stage_id}: layers {window.layer_start} to {window.layer_end - 1}"
        f"{', embedding' if window.embedding else ''}{', head' if window.head else ''}"
        for window in plan.windows
    ]


def _plan_table(plan: Plan) -> Table:
    table = _table("stage", "layers", "with", ">predicted", "link to the next")
    for window in plan.windows:
        ends = [name for name in ("embedding", "head") if getattr(window, name)]
        table.add_row(
            Text(window.stage_id),
            _layers(window.layer_start, window.layer_end),
            ", ".join(ends),
            f"{window.predicted_s * 1e3:.2f} ms",
            window.carrier,
        )
    return table


def _status(status: Status) -> RenderableType:
    model = status.model
    used = status.kv_blocks_total - status.kv_blocks_free
    facts = Table.grid(padding=(0, 2))
    facts.add_row("state", Text(status.state))
    facts.add_row(
        "model",
        Text(f"{model.name}, {model.architecture} {model.quantization}, context {model.context_length}")
        if model
        else "none",
    )
    facts.add_row("requests", f"{status.requests_running} running, {status.requests_waiting} waiting")
    facts.add_row(
        "tokens/s",
        f"prefill {status.prefill_tokens_per_s:.1f}, decode {status.decode_tokens_per_s:.1f}",
    )
    facts.add_row("KV blocks", f"{used} of {status.kv_blocks_total} in use")
    facts.add_row("so far", f"{status.requests_finished} requests, {status.tokens_generated} tokens")
    facts.add_row("version", f"{status.version}, up {_duration(status.uptime_s)}")
    parts: list[RenderableType] = [facts, "", _stage_table(status.stages) if status.stages else "no stages"]
    details = [Text(f"{stage.stage_id}: {stage.detail}") for stage in status.stages if stage.detail]
    if details:  # a sentence in a column would push the others off the screen
        parts += ["", *details]
    if any(stage.telemetry for stage in status.stages):
        parts += ["", _telemetry_table(status.stages)]
    return Group(*parts)


def _stage_table(stages: Iterable[Stage]) -> Table:
    table = _table(
        "stage", "state", "layers", ">weights", ">KV", ">resident", ">of files", ">ms/layer", ">busy",
        "device", "backend",
    )  # fmt: skip
    for stage in stages:
        table.add_row(
            Text(stage.stage_id),
            Text(stage.state),
            _layers(stage.layer_start, stage.layer_end),
            _bytes(stage.weight_bytes),
            _bytes(stage.kv_bytes),
            _bytes(stage.resident_bytes),
            _bytes(stage.page_cache_bytes),
            f"{stage.layer_time_s * 1e3:.3f}" if stage.layer_time_s else "-",
            f"{stage.busy_fraction:.0%}",
            Text(f"{stage.device.name or stage.device.kind} ({stage.device.hostname})"),
            Text(stage.device.backend),
        )
    return table


def _telemetry_table(stages: Iterable[Stage]) -> Table:
    table = _table(
        "stage", ">GPU memory used", ">free", ">load", ">power", ">SM clock", ">memory clock", ">at",
        "slowed by",
    )  # fmt: skip
    for stage in stages:
        gpu = stage.telemetry
        if gpu is None:
            continue
        limit = f" of {gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
        table.add_row(
            Text(stage.stage_id),
            f"{_bytes(gpu.memory_used_bytes)} of {_bytes(gpu.memory_total_bytes)}",
            _bytes(gpu.memory_free_bytes),
            "-" if gpu.utilization is None else f"{gpu.utilization:.0%}",
            "-" if gpu.power_w is None else f"{gpu.power_w:.0f}{limit} W",
            "-" if gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz} MHz",
            "-" if gpu.memory_clock_mhz is None else f"{gpu.memory_clock_mhz} MHz",
            "-" if gpu.temperature_c is None else f"{gpu.temperature_c} °C",
            Text(", ".join(gpu.throttle_reasons) or "nothing"),
        )
    return table


def _layers(start: int, end: int) -> str:
    return f"{start} to {end - 1}" if end > start else "-"


def _table(*columns: str) -> Table:
    """Columns by name; one that begins with ">" is aligned right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


def _console() -> Console:
    """On a terminal as wide as it is; in a pipe lines are not broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=10_000)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
