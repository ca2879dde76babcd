from dataclasses import dataclass

import pytest

from common import settings
from common.errors import ConfigError
from common.settings import setting


@dataclass(frozen=True)
class Example:
    listen: str = setting("127.0.0.1:1", "where", "ADDRESS")
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
        ('count = "three"', "key 'count' is 'three', expected a whole number"),
        ("count = true", "key 'count' is True"),
        ("listen = 8", "key 'listen' is 8, expected a string .in quotes."),
        ("model_dir = 'a'", "expected a list of strings"),
        ("count = ", "config"),
        ("count = " + "[" * 5000 + "]" * 5000, "config .*: values are nested too deeply"),
        ("count = " + "9" * 5000, "config .*digits"),
        ("count = [0x" + "f" * 5000 + "]", "key 'count' is a number too long to show, expected a whole"),
        ("lease_s = 1" + "0" * 400, "key 'lease_s' is 1000+[.]{3}, more than a float holds"),
        ("lease_s = 0x1" + "0" * 5000, "key 'lease_s' is a number too long to show, more than a float"),
        (r'listen = "unix:/a\u0000b"', r"key 'listen' is 'unix:/a\\x00b': no setting holds a NUL"),
        (r'model_dir = ["/a", "/b\u0000"]', "key 'model_dir' .* NUL character"),
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
    with pytest.raises(ConfigError, match="config a\0b: embedded null"):
        load("--config", "a\0b")
    with pytest.raises(ConfigError, match="PIPELLM_COUNT is 'x', expected a whole number"):
        load(PIPELLM_COUNT="x")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--count", "many"), "^--count is 'many', expected a whole number$"),
        (("--count", "1.5"), "^--count is '1.5', expected a whole number$"),
        (("--lease-s", "soon"), "^--lease-s is 'soon', expected a number$"),
    ],
)
def test_a_bad_flag_is_named_with_what_is_expected(argv, message):
    with pytest.raises(ConfigError, match=message):
        load(*argv)


def test_help_says_what_a_value_is(capsys):
    with pytest.raises(SystemExit):
        load("--help")
    told = capsys.readouterr().out
    for flag in ("--listen ADDRESS", "--count N", "--lease-s N", "--model-dir TEXT", "--config FILE"):
        assert flag in told


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"count": 0}, "count is 0, expected 1 to 5"),
        ({"count": 6}, "count is 6, expected 1 to 5"),
        ({"count": 16**5000}, "count is a number too long to show, expected 1 to 5"),
        ({"lease_s": float("inf")}, "lease_s is inf, expected 0.5 to 10"),
        ({"lease_s": float("nan")}, "lease_s is nan, expected 0.5 to 10"),
        ({"lease_s": float("-inf")}, "lease_s is -inf"),
    ],
)
def test_a_number_out_of_its_range_is_told_with_the_range(setting, message):
    ranges = {"count": (1, 5), "lease_s": (0.5, 10)}
    settings.check_ranges(Example(count=1, lease_s=10.0), ranges)
    with pytest.raises(ConfigError, match=message):
        settings.check_ranges(Example(**setting), ranges)


def test_an_unknown_flag_ends_with_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        load("--colour", "red")
    assert ended.value.code == 2
    assert "--colour" in capsys.readouterr().err
