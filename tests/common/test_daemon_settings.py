"""What the daemons' own settings may be: numbers that a message, a clock and a machine can hold."""

import pytest

from common import settings
from common.errors import ConfigError
from coordinator.config import CoordinatorConfig
from stage.config import StageConfig

Daemon = type[CoordinatorConfig] | type[StageConfig]


@pytest.mark.parametrize(
    ("daemon", "argv", "message"),
    [
        (CoordinatorConfig, ["--lease-s", "inf"], "lease_s is inf, expected 0.1 to 3600"),
        (CoordinatorConfig, ["--lease-s", "nan"], "lease_s is nan, expected 0.1 to 3600"),
        (CoordinatorConfig, ["--load-timeout-s", "inf"], "load_timeout_s is inf, expected 0.1 to 1000000"),
        (CoordinatorConfig, ["--drain-s", "-1"], "drain_s is -1.0, expected 0.0 to 1000000"),
        (CoordinatorConfig, ["--context-length", "99999999999"], "context_length is 99999999999, expected 0"),
        (CoordinatorConfig, ["--max-step-tokens", "4294967296"], "expected 1 to 2147483647"),
        (CoordinatorConfig, ["--kv-block-size", "0"], "kv_block_size is 0, expected 1 to 2147483647"),
        (StageConfig, ["--threads", "2147483648"], "threads is 2147483648, expected 0 to 4096"),
        (StageConfig, ["--threads", "-1"], "threads is -1, expected 0 to 4096"),
        (StageConfig, ["--memory", str(2**64)], "memory: '18446744073709551616' is no amount of memory"),
    ],
)
def test_a_number_that_cannot_work_is_refused_by_name_and_range(
    daemon: Daemon, argv: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.load(daemon, "", argv, {}).checked()


@pytest.mark.parametrize("daemon", [CoordinatorConfig, StageConfig])
def test_help_says_what_every_text_is(daemon: Daemon) -> None:
    for name, field in daemon.__dataclass_fields__.items():
        assert field.metadata["help"]
        if field.type in ("str", "tuple[str, ...]"):
            assert field.metadata["metavar"], name


@pytest.mark.parametrize("daemon", [CoordinatorConfig, StageConfig])
def test_every_number_of_a_daemon_has_a_range(daemon: Daemon) -> None:
    for name, field in daemon.__dataclass_fields__.items():
        if field.type in ("int", "float"):
            argv = [f"--{name.replace('_', '-')}", "1" + "0" * 300]
            with pytest.raises(ConfigError, match=f"{name} is .*, expected"):
                settings.load(daemon, "", argv, {}).checked()
