"""The systemd units are sound, and start the daemons with options that these have."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common import settings
from coordinator.config import CoordinatorConfig
from stage.config import StageConfig

UNITS = Path(__file__).resolve().parent.parent / "systemd"
INSTALLED_BIN = "/opt/pipellm/.venv/bin/"


def exec_start(unit: str) -> list[str]:
    found = re.search(r"^ExecStart=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)
    assert found
    return found[1].split()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", ["pipellm.target", "pipellm-coordinator.service", "pipellm-stage@.service"])
def test_systemd_finds_no_fault(unit: str, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("pipellm-coordinator", "pipellm-stage"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    for path in UNITS.glob("pipellm*.*"):
        (tmp_path / path.name).write_text(path.read_text().replace(INSTALLED_BIN, f"{programs}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"./{unit}"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "pipellm" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_stage_unit_uses_options_that_the_stage_has() -> None:
    program, *arguments = exec_start("pipellm-stage@.service")
    assert program == f"{INSTALLED_BIN}pipellm-stage"
    instance = {"%i": "cuda:0", "%l-%i": "host-cuda:0", "${PIPELLM_STAGE_LISTEN}": "127.0.0.1:0"}
    config = settings.load(StageConfig, "", [instance.get(word, word) for word in arguments], {}).checked()
    assert (config.device, config.stage_id, config.listen) == ("cuda:0", "host-cuda:0", "127.0.0.1:0")


def test_the_environment_file_holds_settings_that_exist(tmp_path: Path) -> None:
    lines = (UNITS / "pipellm.env").read_text().splitlines()
    pairs = [line.removeprefix("#") for line in lines if re.match(r"#?PIPELLM_", line)]
    env = dict(pair.split("=", 1) for pair in pairs)
    assert settings.load(CoordinatorConfig, "", [], env).model_dir == ("/srv/models",)
    assert settings.load(StageConfig, "", [], env).coordinator == "127.0.0.1:7070"
    fields = {*CoordinatorConfig.__dataclass_fields__, *StageConfig.__dataclass_fields__, "stage_listen"}
    assert {name.removeprefix("PIPELLM_").lower() for name in env} <= fields
