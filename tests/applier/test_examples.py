"""The examples and the workflows: parsed, and their commands run in a sandbox folder.

What an engine, a cluster or a forge would have to do is not run: `vllm serve`, `git clone`; `gh`
and `docker` are stand-ins.
"""

from __future__ import annotations

import configparser
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixes.applier.pack import Pack
from tests.applier.command import install_command
from tests.applier.world import World
from tests.support import absence
from tests.support.trees import Trees

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def sandboxed(
    world: World, command: str, *, tools: Path = Path(sys.executable).parent, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run an example's command with its folders and its profile replaced by the small pack's.

    Programs in ``tools`` are found before all others.
    """
    install_command(world)
    root = world.pack.parent
    for folder, here in {
        "/pack/gaudi-fix-pack": world.pack,
        "/opt/gaudi-fix-pack": world.pack,
        "/overlay": root / "overlay",
        "/var/lib/vllm-gaudi": root / "state",
    }.items():
        command = re.sub(rf"(?<![\w/.-]){folder}(?![\w-])", str(here), command)
    command = command.replace("v0.30.0", "v1.0.0").replace("/usr/bin/python3", "python3")
    command = re.sub(r"\b(gdn-prefix-cache|vllm-long-prefill-share)\b", "delta", command)
    return subprocess.run(
        ["sh", "-c", command],
        env={
            **os.environ,
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(world.site),
            **variables,
        },
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )


def imported_from(world: World, path: Path) -> str:
    """Where the server of an example imports a rewritten module from."""
    for package in ("vllm", "vllm_gaudi"):
        (world.site / package / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import vllm.engine as e; print(e.__file__, e.Engine().step(0))"],
        env={**os.environ, "PYTHONPATH": f"{path}:{world.site}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def profiles_named_in(text: str) -> set[str]:
    """Every release that a text names."""
    return set(re.findall(r"\bv0\.\d+\.\d+\b", text))


def test_the_dockerfile_repairs_the_image(world: World, tmp_path: Path) -> None:
    text = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", "")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] not in "# "]
    assert {word for word, _ in steps} <= {"ARG", "FROM", "USER", "COPY", "RUN"}
    assert [rest for word, rest in steps if word == "COPY"] == [". /opt/gaudi-fix-pack"]
    guard, command = [rest for word, rest in steps if word == "RUN"]
    cache = tmp_path / "cache"
    cache.mkdir()
    done = sandboxed(world, command.replace("/tmp/gaudi-fix-pack-cache", str(cache)))
    assert done.returncode == 0, done.stderr
    assert not cache.exists()
    # An image that was not root's must not become so in silence.
    assert [rest for word, rest in steps if word == "USER"] == ["root", "${IMAGE_USER}"]
    assert [rest for word, rest in steps if rest.startswith("IMAGE_USER")] == ["IMAGE_USER"]
    assert sandboxed(world, guard, IMAGE_USER="1000").returncode == 0
    refused = sandboxed(world, guard, IMAGE_USER="")
    assert refused.returncode == 1
    assert "--build-arg IMAGE_USER" in refused.stderr
    assert "fix: alpha" in (world.site / "vllm" / "engine.py").read_text()
    assert (world.site / "vllm_gaudi" / "_fix_delta.py").exists()


def test_what_stays_out_of_a_layer_is_not_what_the_applier_needs() -> None:
    """Whole folders and files by name: no exceptions, nothing with a path."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("**/") for line in lines if not line.startswith("#")]
    assert {".git*", "tests", "__pycache__"} <= set(patterns)
    for needed in ("apply_all.py", "fixes", "profiles", "LICENSE", "applier", "requirements.txt"):
        assert not any(fnmatch.fnmatch(needed, pattern) for pattern in patterns), needed


def test_the_pod_s_server_imports_the_overlay_that_its_init_container_built(world: World) -> None:
    pod = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    spec = pod["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    _, fixes = spec["initContainers"]
    (server,) = spec["containers"]
    assert fixes["image"] == server["image"]
    before = world.snapshot(times=True, state=True)
    done = sandboxed(world, shlex.join(fixes["command"]))
    assert done.returncode == 0, done.stderr
    assert world.snapshot(times=True, state=True) == before
    # The server's own command, with Python in the place of `vllm serve`.
    overlay = world.pack.parent / "overlay" / "current"
    starts = server["command"][2].replace("/overlay/current", str(overlay))
    looks = shlex.join([sys.executable, "-c", "import sys; print(sys.path[1:3])"])
    starts = re.sub(r"exec vllm serve \S+", lambda _: f"exec {looks}", starts)
    done = subprocess.run(
        ["sh", "-c", starts],
        env={**os.environ, "PYTHONPATH": str(world.site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str([str(overlay), str(world.site)])
    assert imported_from(world, overlay) == f"{overlay}/vllm/engine.py 1"


def test_the_pod_brings_the_pack_once_and_whole(tmp_path: Path) -> None:
    """Also when its first init container runs again, or was killed while it cloned."""
    pod = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    bring, fixes = pod["spec"]["initContainers"]
    script = bring["command"][2].replace("/pack", str(tmp_path))
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text('#!/bin/sh\nfor last; do :; done; mkdir "$last" && test "$BREAK" != 1\n')
    git.chmod(0o755)
    for broken, code in (("1", 1), ("0", 0), ("0", 0)):
        done = subprocess.run(
            ["sh", "-c", script],
            env={"PATH": f"{git.parent}:{os.environ['PATH']}", "BREAK": broken},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        pack = fixes["command"][1].removesuffix("/fixes/apply_all.py")
        assert (tmp_path / pack.removeprefix("/pack/")).exists() == (code == 0)


def test_the_service_starts_from_the_overlay_and_not_without(world: World) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((EXAMPLES / "vllm-gaudi.service").read_text())
    service = unit["Service"]
    before = sandboxed(world, service["ExecStartPre"])
    assert before.returncode == 0, before.stderr
    words = shlex.split(service["ExecStart"])
    assert words[2:4] == ["vllm", "serve"]
    folder = f"/var/lib/{service['StateDirectory']}"
    path = words[1].removeprefix("PYTHONPATH=")
    assert path.startswith(f"{folder}/")
    overlay = world.pack.parent / "state" / path.removeprefix(f"{folder}/")
    assert imported_from(world, overlay) == f"{overlay}/vllm/engine.py 1"
    # systemd does not start the server when this fails.
    engine = world.site / "vllm" / "engine.py"
    engine.write_text(engine.read_text().replace("# twice", "# double"))
    assert sandboxed(world, service["ExecStartPre"]).returncode == 3


def test_the_examples_name_profiles_and_fixes_that_exist() -> None:
    pack = Pack(ROOT)
    for path in sorted(EXAMPLES.iterdir()):
        text = path.read_text()
        assert profiles_named_in(text) <= set(pack.profile_names), path.name
        for word in re.findall(r"\b(?:gdn|vllm-long)-[a-z-]+", text.replace("vllm-gaudi", "")):
            assert pack.profile("v0.30.0").entry(word), word


# Workflows ----------------------------------------------------------------------------------------


def jobs_of(path: Path) -> dict[str, Any]:
    """The jobs of a workflow."""
    return dict(yaml.safe_load(path.read_text())["jobs"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_of_a_workflow_is_a_script(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    scripts = [
        step["run"] for job in jobs_of(path).values() for step in job["steps"] if "run" in step
    ]
    assert scripts
    for script in scripts:
        plain = re.sub(r"\$\{\{.*?\}\}", "X", script)
        done = subprocess.run(["bash", "-n"], input=plain, capture_output=True, text=True)
        assert done.returncode == 0, (script, done.stderr)


@pytest.mark.parametrize("job", ["sources", "drift"])
def test_every_profile_has_its_job(job: str) -> None:
    matrix = jobs_of(ROOT / ".github" / "workflows" / "images.yml")[job]["strategy"]["matrix"]
    profiles = matrix.get("profile") or [entry["profile"] for entry in matrix["include"]]
    assert profiles == Pack(ROOT).profile_names


def test_ci_lets_no_test_of_the_oldest_release_be_skipped() -> None:
    named = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["env"]
    assert named[absence.VARIABLE] == Pack(ROOT).profile_names[0]


def step_of(job: str, name: str) -> dict[str, Any]:
    """A step of images.yml by the beginning of its name."""
    steps = jobs_of(ROOT / ".github" / "workflows" / "images.yml")[job]["steps"]
    (found,) = (step for step in steps if step.get("name", "").startswith(name))
    return dict(found)


def stand_in(folder: Path, name: str, script: str) -> Path:
    """A folder with a program that stands in for another."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("listing", "code", "opened"), [("exit 4", 4, False), ("echo 1", 0, False), ("echo 0", 0, True)]
)
def test_the_drift_job_opens_an_issue_that_is_not_there(
    tmp_path: Path, listing: str, code: int, opened: bool
) -> None:
    """A forge that does not answer is a failure, and not an issue that is there."""
    (tmp_path / "drift.md").write_text("# a title\n\n| what | differs |\n")
    log = tmp_path / "log"
    gh = f'echo "$@" >> {log}\nif [ "$2" = list ]; then {listing}; fi'
    tools = stand_in(tmp_path / "tools", "gh", gh)
    done = subprocess.run(
        ["bash", "-e", "-c", step_of("drift", "Open an issue")["run"]],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
    )
    assert done.returncode == code
    listed, *created = log.read_text().splitlines()
    assert listed.startswith('issue list --state all --search in:title "a title"')
    assert created == (["issue create --title a title --body-file body.md"] if opened else [])
    assert not opened or (tmp_path / "body.md").read_text() == "| what | differs |\n"


@pytest.mark.parametrize("event", ["schedule", "workflow_dispatch"])
def test_the_drift_job_opens_issues_when_asked_and_each_week(event: str) -> None:
    assert event in step_of("drift", "Open an issue")["if"]
    assert event in yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())[True]


@pytest.mark.parametrize("user", ["0", "1000"])
@pytest.mark.parametrize("words", ["", "delta", "delta --package vllm_gaudi"])
def test_the_image_job_checks_what_the_image_runs(world: World, user: str, words: str) -> None:
    """With its opt-in fixes and options, and as its user: one who is not root has an overlay."""
    tools = world.pack.parent / "tools"
    stand_in(tools, "docker", 'while [ "$1" != --entrypoint ]; do shift; done\n"$2" "${@:4}"')
    stand_in(tools, "id", f"echo {user}")
    stand_in(tools, "python3", f'echo "$@" >> {tools}/words; exec {sys.executable} "$@"')
    variables = {"IMAGE": "image", "PROFILE": "v1.0.0", "WORDS": words}
    before = world.snapshot(times=True, state=True)
    done = sandboxed(world, step_of("image", "Dry run")["run"], tools=tools, **variables)
    assert done.returncode == 0, done.stderr
    assert ("delta: would apply" in done.stdout) == bool(words)
    assert ("alpha: would apply" in done.stdout) == ("--package" not in words)
    assert ("--overlay" in (tools / "words").read_text()) == (user != "0")
    assert world.snapshot(times=True, state=True) == before


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_once_at_a_time(path: Path) -> None:
    assert "github.event_name" in yaml.safe_load(path.read_text())["concurrency"]["group"]


def run_steps(job: str, release: str, folder: Path, *, without: tuple[str, ...]) -> dict[str, str]:
    """Run a job's steps in a checkout of the pack; what they wrote for the forge.

    Commands that start with one of ``without`` are left out: they need what is not here.
    """
    checkout = folder / "checkout"
    for name in ("fixes", "profiles", "apply_all.py"):
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, checkout / name, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy(source, checkout / name)
    forge = {name: folder / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for step in jobs_of(ROOT / ".github" / "workflows" / "images.yml")[job]["steps"]:
        if "run" not in step or "if" in step:
            continue
        script = step["run"].replace("${{ matrix.profile }}", release)
        lines = [line for line in script.splitlines() if not line.startswith(without)]
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
            cwd=checkout,
            env={
                **os.environ,
                **{name: str(path) for name, path in forge.items()},
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, (step["name"], done.stdout[-2000:], done.stderr[-2000:])
    return {name: path.read_text() for name, path in forge.items() if path.exists()}


@pytest.fixture
def release(trees: Trees, request: pytest.FixtureRequest) -> str:
    """A release all of whose packages are at hand."""
    name = str(request.param)
    missing = trees.stock(name).missing
    if missing:
        absence.skip(f"{' and '.join(missing)} of {name} cannot be had: {missing}", name)
    return name


@pytest.mark.parametrize("release", Pack(ROOT).profile_names, indirect=True)
def test_the_dry_run_job(release: str, tmp_path: Path) -> None:
    run_steps("sources", release, tmp_path, without=())


@pytest.mark.parametrize("release", ["v0.26.0"], indirect=True)
def test_the_drift_job_says_what_differs_in_a_branch(
    release: str, trees: Trees, tmp_path: Path
) -> None:
    branch = tmp_path / "checkout" / "branch"  # as `git clone` would leave it
    shutil.copytree(trees.stock(release).path / "vllm_gaudi", branch / "vllm_gaudi")
    project = '[project]\nname = "vllm-gaudi"\nversion = "0.26.0"\n'
    (branch / "pyproject.toml").write_text(project)
    path = branch / "vllm_gaudi" / "v1" / "worker" / "hpu_input_batch.py"
    renamed = path.read_text().replace("def make_selective_sampling_metadata(", "def other(")
    path.write_text(renamed)
    told = run_steps("drift", release, tmp_path, without=("git clone",))
    assert told["GITHUB_OUTPUT"] == "code=3\n"
    title, *rows = told["GITHUB_STEP_SUMMARY"].splitlines()
    assert re.match(rf"# {release}: \d+ of \d+ definitions differ in vllm .* vllm_gaudi", title)
    site = "hpu_input_batch.py::InputBatch.make_selective_sampling_metadata` | gone"
    assert any(site in row for row in rows)
