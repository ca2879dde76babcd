from dataclasses import dataclass, field

import pytest

from common import settings
from common.errors import ConfigError


@dataclass(frozen=True)
class Example:
    listen: str = field(default="127.0.0.1:1", metadata={"help": "where"})
    count: int = 3
    lease_s: float = 2.0
    verbose: bool = False
    model_dir: tuple[str, ...] = ()


def load(*argv, **env):
    return settings.load(Example, "example", list(argv), env)


def test_defaults_stand_when_nothing_is_said():
    assert load() == Example()


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text('listen = "file:1"\ncount = 10\nlease_s = 5\nmodel_dir = ["a", "b"]\n')
    got = load("--config", str(config), "--listen", "flag:1", PIPELLM_LISTEN="env:1", PIPELLM_COUNT="20")
    assert got == Example("flag:1", 20, 5.0, False, ("a", "b"))


def test_lists_and_booleans():
    got = load("--model-dir", "x", "--model-dir", "y", "--verbose")
    assert got.model_dir == ("x", "y") and got.verbose
    assert load(PIPELLM_MODEL_DIR="p:q", PIPELLM_VERBOSE="yes") == Example(verbose=True, model_dir=("p", "q"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "unknown key 'colour'"),
        ('count = "three"', "key 'count' is 'three', expected int"),
        ("count = true", "key 'count' is True"),
        ("model_dir = 'a'", "expected a list of strings"),
        ("count = ", "config"),
    ],
)
def test_a_bad_file_is_refused_by_key(tmp_path, text, message):
    config = tmp_path / "c.toml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load("--config", str(config))


def test_a_missing_file_and_a_bad_variable_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.toml"):
        load("--config", str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match="PIPELLM_COUNT is 'x', expected int"):
        load(PIPELLM_COUNT="x")


def test_an_unknown_flag_ends_with_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        load("--colour", "red")
    assert ended.value.code == 2
    assert "--colour" in capsys.readouterr().err
