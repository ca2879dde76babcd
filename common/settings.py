"""Settings of a daemon: one frozen dataclass, filled from flags > PIPELLM_* environment > TOML > defaults.

Each field of the dataclass is one setting, made by `setting` (or with a plain default). Its name gives the
flag (`model_dir` is `--model-dir`), the variable (`PIPELLM_MODEL_DIR`) and the TOML key (`model_dir`).
Types: str, int, float, bool, and tuple[str, ...] (a repeated flag, a TOML list, an os.pathsep-separated
variable). Unknown keys are errors. What a value means, and "auto", is the daemon's business; `check_ranges`
helps it with numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError

ENV_PREFIX = "PIPELLM_"
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string (in quotes)"}

T = TypeVar("T")


def setting(default: T, text: str, metavar: str = "") -> T:
    """A field of a settings class, with what --help says of it and writes for its value."""
    made: Any = dataclasses.field(default=default, metadata={"help": text, "metavar": metavar})
    return typing.cast(T, made)


def load(
    cls: type[T], description: str, argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ
) -> T:
    """The settings of this process. Raises ConfigError naming the source and key of a bad value."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    for field in fields:
        _add_flag(parser, field, hints[field.name])
    flags = vars(parser.parse_args(argv))
    config = flags.pop("config") or env.get(ENV_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    if config:
        values.update(_from_toml(Path(config), hints))
    for field in fields:
        name = ENV_PREFIX + field.name.upper()
        if name in env:
            values[field.name] = _parse(env[name], hints[field.name], f"environment variable {name}")
    for field in fields:
        if flags[field.name] is not None:
            flag = "--" + field.name.replace("_", "-")
            values[field.name] = _of_flag(flags[field.name], hints[field.name], flag)
    return cls(**values)


def check_ranges(config: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises ConfigError unless each named setting lies from its first to its second bound, both allowed."""
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        if not least <= value <= most:  # NaN is in no range
            raise ConfigError(f"{name} is {_shown(value)}, expected {least} to {most}")


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], kind: Any) -> None:
    flag = "--" + field.name.replace("_", "-")
    default = field.default if field.default not in ("", ()) else "none"
    text = f"{field.metadata.get('help', '')} (default: {default})".replace("%", "%%")
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    metavar = field.metadata.get("metavar") or ("N" if kind in (int, float) else "TEXT")
    parser.add_argument(
        flag, action="append" if _is_tuple(kind) else "store", default=None, help=text, metavar=metavar
    )


def _of_flag(value: Any, kind: Any, flag: str) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, bool) else _converted(value, kind, flag)


def _from_toml(path: Path, hints: Mapping[str, Any]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, thousands of digits, a NUL in the path
        raise ConfigError(f"config {path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"config {path}: values are nested too deeply") from error
    for key, value in table.items():
        if key not in hints:
            known = ", ".join(sorted(hints))
            raise ConfigError(f"config {path}: unknown key {key!r}; known are {known}")
        table[key] = _checked(value, hints[key], f"config {path}: key {key!r}")
    return table


def _checked(value: Any, kind: Any, where: str) -> Any:
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise ConfigError(f"{where} is {_shown(value)}: no setting holds a NUL character")
    if _is_tuple(kind):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif type(value) is kind or (kind is float and type(value) is int):
        return _converted(value, kind, where)
    wanted = "a list of strings" if _is_tuple(kind) else _WORDS[kind]
    raise ConfigError(f"{where} is {_shown(value)}, expected {wanted}")


def _parse(text: str, kind: Any, where: str) -> Any:
    if _is_tuple(kind):
        return tuple(part for part in text.split(os.pathsep) if part)
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ConfigError(f"{where} is {_shown(text)}, expected one of {', '.join(words)}")
        return words[text.lower()]
    return _converted(text, kind, where)


def _converted(value: Any, kind: Any, where: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{where} is {_shown(value)}, expected {_WORDS[kind]}") from None
    except OverflowError:
        raise ConfigError(f"{where} is {_shown(value)}, more than a {kind.__name__} holds") from None


def _shown(value: Any) -> str:
    """For a message: shortened, and whatever Python refuses to write out (a huge number) described."""
    try:
        text = repr(value)
    except ValueError:
        return "a number too long to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple
