"""The units: what systemd says of them, and what fits the configuration."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from deployed import ENDING_S, FLUSH_S, SYSTEMD, UNITS, read_config, read_unit, tool

CONFIG = read_config(SYSTEMD / "kvkeep.toml")
MOST_EXPOSED = 20  # of 100, by systemd's own reckoning; a unit without protection has about 96
SECONDS = {"serve": CONFIG["serve"]["drain-timeout"] + FLUSH_S,
           "route": CONFIG["route"]["drain-timeout"]}  # fmt: skip
units = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


def test_there_is_one_for_each_command():
    assert [path.stem for path in UNITS] == ["kvkeep-route", "kvkeep-serve"]


def analyze(*words):
    return subprocess.run(
        [tool("systemd-analyze"), *words], capture_output=True, text=True, check=False, timeout=60
    )


@units
def test_systemd_takes_the_unit(path, tmp_path):
    """With a program that is there in place of ours."""
    text = path.read_text("utf-8").replace("/opt/kvkeep/bin/kvkeep", sys.executable)
    unit = tmp_path / path.name
    unit.write_text(text.replace("User=kvkeep", "User=root"), "utf-8")
    done = analyze("verify", "--man=no", str(unit))
    ours = [line for line in done.stderr.splitlines() if path.stem in line]
    assert done.returncode == 0, done.stderr
    assert not ours


@units
def test_systemd_finds_the_unit_confined(path):
    done = analyze(
        "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", "--json=short",
        str(path),
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze does not read files (before systemd 250)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)


@units
def test_a_unit_has_time_to_end(path):
    service = read_unit(path)["Service"]
    (given,) = service["TimeoutStopSec"]
    assert int(given) >= SECONDS[path.stem.removeprefix("kvkeep-")] + ENDING_S
    assert service["KillSignal"] == ["SIGTERM"]
    assert service["KillMode"] == ["mixed"], "KV is written after the first signal"


@units
def test_what_a_unit_holds_of_prompts_reaches_no_disk(path):
    service = read_unit(path)["Service"]
    assert (service["LimitCORE"], service["MemorySwapMax"]) == (["0"], ["0"])


def test_only_the_server_has_its_key():
    having = [path.stem for path in UNITS if "EnvironmentFile" in read_unit(path)["Service"]]
    assert having == ["kvkeep-serve"]


@units
def test_a_unit_is_started_again_unless_its_options_are_wrong(path):
    service = read_unit(path)["Service"]
    assert service["Restart"] == ["on-failure"]
    assert service["RestartPreventExitStatus"] == ["2"]


def test_the_tier_on_disk_is_in_the_directory_that_systemd_makes():
    service = read_unit(SYSTEMD / "kvkeep-serve.service")["Service"]
    (disk,) = [url for url in CONFIG["serve"]["tier"] if url.startswith("file://")]
    (directory,) = service["StateDirectory"]
    assert urlsplit(disk).path.startswith(f"/var/lib/{directory}/")
    cache = re.findall(r"XDG_CACHE_HOME=(\S+)", " ".join(service["Environment"]))
    assert cache == [f"/var/cache/{service['CacheDirectory'][0]}"]


def test_the_user_is_made():
    made = re.findall(r"^u (\S+) ", (SYSTEMD / "kvkeep.sysusers").read_text("utf-8"), re.MULTILINE)
    for path in UNITS:
        assert read_unit(path)["Service"]["User"] == made


def test_what_is_kept_private_stays_on_this_machine():
    assert urlsplit(CONFIG["serve"]["events"]).hostname == "127.0.0.1"
    assert CONFIG["serve"]["host"] == CONFIG["route"]["host"] == "127.0.0.1"
