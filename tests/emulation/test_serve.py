"""`vllm serve` from an overlay: the server, its engine core and its spawned workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fixes.authoring.fetching import cache_folder
from tests.emulation.gaudi import SITE
from tests.support import absence
from tests.support.environments import NoInterpreter, interpreter
from tests.support.trees import Trees

ROOT = Path(__file__).parents[2]
RELEASE = "v0.26.0"
REWRITTEN = "vllm_gaudi/v1/worker/hpu_input_batch.py"
LIMIT = 400  # seconds for the server to start: three processes import vLLM

# Tells which process ran a module of that name from which file.
SITECUSTOMIZE = f"""
import os, sys
def hook(event, args):
    if event == "exec":
        name = getattr(args[0], "co_filename", "")
        if name.endswith("/{REWRITTEN}"):
            with open(os.environ["RAN_FILE"], "a") as file:
                file.write(f"{{os.getpid()}} {{name}}\\n")
sys.addaudithook(hook)
"""
# What the console script of the `vllm` distribution is.
VLLM = """
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
MODEL = """
import sys
from pathlib import Path
from tests.emulation import models
print(models.build("dense", Path(sys.argv[1])))
"""


@pytest.fixture
def python() -> str:
    """The engine's interpreter."""
    try:
        return interpreter(frozenset({"engine"}), cache_folder())
    except NoInterpreter as error:
        absence.skip(str(error), RELEASE)


def ask(port: int, path: str, body: object = None) -> tuple[int, str]:
    """Status and answer of the server; 0 while there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_a_server_and_its_workers_run_from_an_overlay(
    trees: Trees, tmp_path: Path, python: str
) -> None:
    stock = trees.stock(RELEASE)
    if stock.missing:
        absence.skip(f"{stock.missing} of {RELEASE} cannot be had", RELEASE)
    command = [sys.executable, str(ROOT / "fixes" / "apply_all.py"), "--profile", RELEASE]
    words = ["--site-packages", str(stock.path), "--overlay", str(tmp_path / "overlay"), "-q"]
    line = subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "vllm").write_text(VLLM)
    path = os.pathsep.join(map(str, [tmp_path / "hook", stock.path, SITE, ROOT]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "RAN_FILE": str(tmp_path / "ran"),
        "VLLM_SKIP_WARMUP": "true",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "PT_HPU_LAZY_MODE": "0",
        "OMP_NUM_THREADS": "1",
    }
    made = subprocess.run(
        [python, "-c", MODEL, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-2000:]
    model = made.stdout.split()[-1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = f"exec {python} {tmp_path}/vllm serve {model} --served-model-name m --port {port}"
    options = "--dtype bfloat16 --max-model-len 256 --max-num-seqs 2 --num-gpu-blocks-override 16"
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            ["sh", "-c", f"{line}\n{serve} {options} --tensor-parallel-size 2"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + LIMIT
        while ask(port, "/health")[0] != 200:
            tail = (tmp_path / "log").read_text(errors="replace")[-3000:]
            assert server.poll() is None, tail
            assert time.monotonic() < end, tail
            time.sleep(0.5)
        # On stock packages the second of two requests with bad words ends the engine.
        body = {
            "model": "m",
            "prompt": [[5, 6, 7], [7, 6, 5]],
            "max_tokens": 3,
            "bad_words": ["w1", "w2"],
        }
        status, text = ask(port, "/v1/completions", body)
        assert status == 200, text
        assert len(json.loads(text)["choices"]) == 2
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    ran = [entry.split(" ", 1) for entry in (tmp_path / "ran").read_text().splitlines()]
    overlay = line.partition("=")[2].partition("$")[0]
    assert {name for _, name in ran} == {f"{overlay}/{REWRITTEN}"}
    assert len({pid for pid, _ in ran}) >= 2  # one of each worker at least
