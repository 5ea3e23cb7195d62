"""The workflows of the public repository: they parse, and what they run exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def test_there_are_workflows_for_tests_releases_and_documents() -> None:
    assert [one.stem for one in WORKFLOWS] == ["build", "docs", "tests"]


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="see requirements-dev.txt")
def test_they_are_as_the_schema_of_workflows_wants() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows",
         *WORKFLOWS],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda one: one.stem)
def test_actions_are_pinned_jobs_end_and_rights_are_few(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text("utf-8"))
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]), step["uses"]


def test_only_a_tag_is_given_the_right_to_write() -> None:
    """Code of a pull request, and what it installs, never runs with a token that can push."""
    for workflow in WORKFLOWS:
        for name, job in yaml.safe_load(workflow.read_text("utf-8"))["jobs"].items():
            if "write" in job.get("permissions", {}).values():
                assert job["if"] == "github.ref_type == 'tag'", f"{workflow.stem}: {name}"


def test_nothing_that_a_stranger_names_is_put_into_a_script() -> None:
    """A branch or a title is an argument or a variable, never text of a script."""
    for workflow in WORKFLOWS:
        for step in steps(workflow):
            assert "${{" not in step.get("run", ""), f"{workflow.stem}: {step['run']}"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda one: one.stem)
def test_what_they_run_exists(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    ran = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    for target in re.findall(r"\bmake ([\w-]+)", ran):
        assert target in targets, target
    for file in re.findall(r"python (\S+\.py)", ran):
        assert (ROOT / file).is_file(), file
    cached = [step["with"].get("cache-dependency-path", "") for step in steps(workflow)
              if "setup-python" in step.get("uses", "")]  # fmt: skip
    for pattern in "\n".join(cached).split():
        assert list(ROOT.glob(pattern)), pattern


def test_every_python_of_the_classifiers_is_tested_and_gets_a_bare_environment() -> None:
    prefix = "Programming Language :: Python :: 3."
    promised = {f"3.{one.removeprefix(prefix)}" for one in PROJECT["classifiers"]
                if one.startswith(prefix)}  # fmt: skip
    text = {one.stem: one.read_text("utf-8") for one in WORKFLOWS}
    assert set(re.findall(r"3\.\d\d", text["tests"])) == promised
    assert set(re.findall(r"3\.\d\d", text["build"])) == promised


def test_the_tag_of_a_release_is_compared_with_the_version() -> None:
    [step] = [step for step in steps(ROOT / ".github/workflows/build.yml") if "if" in step]
    for tag, code in ((f"v{PROJECT['version']}", 0), ("v9.9.9", 1)):
        done = subprocess.run(
            ["bash", "-c", step["run"]],
            cwd=ROOT,
            env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == code, tag
