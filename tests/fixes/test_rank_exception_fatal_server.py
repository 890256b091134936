"""rank-exception-fatal: the exit code of the API server, with vLLM's and uvicorn's own."""

from __future__ import annotations

import asyncio
import importlib
import socket
from types import SimpleNamespace

import pytest

from tests.support import standin

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def launcher():
    standin.plain_vllm()
    try:
        return importlib.import_module("vllm.entrypoints.launchers.launcher")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.entrypoints.launcher")


def serve(launcher, *, died):
    """Serve until the engine has died, or the server is told to stop; then as `vllm serve`."""
    from fastapi import FastAPI

    async def whole():
        app = FastAPI()
        app.state.server = None
        app.state.engine_client = SimpleNamespace(errored=False, is_running=True)

        async def end():
            while app.state.server is None or not app.state.server.started:
                await asyncio.sleep(0.01)
            if died:
                app.state.engine_client.errored, app.state.engine_client.is_running = True, False
                launcher.terminate_if_errored(app.state.server, app.state.engine_client)
            else:
                app.state.server.should_exit = True

        ending = asyncio.create_task(end())
        with socket.create_server(("127.0.0.1", 0)) as sock:
            shutdown = await launcher.serve_http(app, sock=sock, port=0, log_level="error")
            await ending
        await shutdown
        return "an orderly end"

    return asyncio.run(whole())


@pytest.mark.red(r"DID NOT RAISE")
def test_server_whose_engine_died(launcher):
    with pytest.raises(SystemExit) as ended:
        serve(launcher, died=True)
    assert ended.value.code == 1


def test_server_that_is_stopped(launcher):
    assert serve(launcher, died=False) == "an orderly end"
