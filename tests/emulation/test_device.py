"""The emulated device keeps the promises of its docstring."""

import threading
from typing import Any

import pytest

from tests.emulation import gaudi

pytestmark = [pytest.mark.needs("engine"), pytest.mark.only("v0.26.0")]


@pytest.fixture(scope="module")
def torch() -> Any:
    gaudi.install()
    import torch

    return torch


@pytest.mark.parametrize("device", ["hpu", "hpu:0", "hpu:3"])
def test_everything_that_says_hpu_is_on_the_cpu(torch: Any, device: str) -> None:
    named = torch.device(device)
    assert named.type == "hpu"
    for place in (device, named):
        assert torch.zeros(2, device=place).device.type == "cpu"
        assert torch.ones(2).to(place).device.type == "cpu"
        assert torch.tensor([1], device=place).device.type == "cpu"
        assert torch.nn.Linear(2, 2).to(place).weight.device.type == "cpu"


def test_default_device(torch: Any) -> None:
    with torch.device("hpu"):
        assert torch.empty(1).device.type == "cpu"
        assert torch.nn.Embedding(3, 2).weight.device.type == "cpu"
        assert torch.get_default_device() == torch.device("hpu:0")
    torch.set_default_device("hpu")
    try:
        assert torch.empty(1).device.type == "cpu"
        assert torch.get_default_device() == torch.device("hpu:0")
    finally:
        torch.set_default_device(None)
    assert torch.get_default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"


def test_number_is_the_accelerator(torch: Any) -> None:
    assert torch.device(1) == torch.device("hpu:1")
    assert torch.zeros(1, device=0).device.type == "cpu"


@pytest.mark.parametrize("transfer", ["to_hpu", "to_cpu", "cpu", "as_tensor", "keyword"])
def test_transfers_copy(torch: Any, transfer: str) -> None:
    source = torch.arange(4)
    copy = {
        "to_hpu": lambda: source.to("hpu", non_blocking=True),
        "to_cpu": lambda: source.to("cpu"),
        "cpu": lambda: source.cpu(),
        "as_tensor": lambda: torch.as_tensor(source, device="hpu"),
        "keyword": lambda: source.to(device="hpu", dtype=torch.long),
    }[transfer]()
    source.fill_(9)
    assert copy.tolist() == [0, 1, 2, 3]


def test_numpy_memory_is_not_shared_with_the_device(torch: Any) -> None:
    import numpy

    host = numpy.arange(3)
    device = torch.as_tensor(host, device="hpu")
    host[:] = 7
    assert device.tolist() == [0, 1, 2]


def test_change_of_type_alone_copies_nothing(torch: Any) -> None:
    source = torch.arange(4)
    assert source.to(torch.int64) is source


def test_negative_indices_wrap_or_are_dropped(torch: Any) -> None:
    table = torch.arange(12.0).view(4, 3)
    index = torch.tensor([0, -1])
    assert table.index_select(0, index).tolist() == table[[0, 3]].tolist()
    assert torch.nn.functional.embedding(index, table).tolist() == table[[0, 3]].tolist()
    assert table.gather(1, torch.tensor([[-1]] * 4)).flatten().tolist() == [2.0, 5.0, 8.0, 11.0]

    written = torch.zeros(4, 1)
    written.index_copy_(0, index, torch.tensor([[1.0], [2.0]]))
    assert written.flatten().tolist() == [1.0, 0.0, 0.0, 2.0]
    largest = torch.zeros(4).index_reduce_(0, index, torch.tensor([5.0, 6.0]), "amax")
    assert largest.tolist() == [5.0, 0.0, 0.0, 6.0]

    hot = torch.nn.functional.one_hot(torch.tensor([1, -1]), num_classes=3)
    assert hot.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_every_thread_has_the_device(torch: Any) -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(torch.zeros(1, device="hpu").device.type))
    thread.start()
    thread.join()
    assert seen == ["cpu"]


def test_generators(torch: Any) -> None:
    generator = torch.Generator(device="hpu").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    first = torch.rand(2, generator=generator, device="hpu")
    again = torch.rand(2, generator=torch.Generator().manual_seed(3))
    assert first.tolist() == again.tolist()


def test_compile_is_identity(torch: Any) -> None:
    def double(x: Any) -> Any:
        return x * 2

    assert torch.compile(double, backend="hpu_backend") is double
    assert torch.compile(dynamic=True)(double) is double


def test_streams_events_and_memory(torch: Any) -> None:
    stream, start, end = torch.hpu.Stream(), torch.hpu.Event(), torch.hpu.Event()
    start.record()
    with torch.hpu.stream(stream):
        stream.wait_stream(torch.hpu.current_stream())
        end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    free, total = torch.hpu.mem_get_info()
    assert 0 < free <= total


def test_graph_wrapper_runs_the_module(torch: Any) -> None:
    import habana_frameworks.torch as htorch

    module = htorch.hpu.wrap_in_hpu_graph(torch.nn.Identity(), disable_tensor_cache=True)
    assert module(5, bypass_hpu_graphs=True) == 5


def test_metadata_that_the_plugin_reads() -> None:
    from importlib.metadata import version

    gaudi.install()
    assert version("habana-torch-plugin").startswith("1.24.1")
    assert version("neural_compressor_pt") == "3.7"


def test_child_processes_have_the_device() -> None:
    import subprocess
    import sys

    gaudi.install()
    code = "import torch; print(torch.zeros(1, device='hpu').device)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "cpu", done.stderr


def test_collectives_between_two_processes(tmp_path: Any) -> None:
    """The hccl backend moves real data between real processes."""
    import subprocess
    import sys

    gaudi.install()
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "rank = int(sys.argv[1])\n"
        "place = 'file://' + sys.argv[2]\n"
        "dist.init_process_group('hccl', init_method=place, rank=rank, world_size=2)\n"
        "x = torch.tensor([rank + 1.0], device='hpu')\n"
        "both = torch.empty(2, device='hpu')\n"
        "dist.all_gather_into_tensor(both, x)\n"
        "dist.all_reduce(x)\n"
        "print(x.item(), both.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert out.strip() == "3.0 [1.0, 2.0]", err


def test_pinned_host_memory_is_host_memory(torch: Any) -> None:
    made = torch.tensor([1, 2], device="cpu", pin_memory=True)
    assert made.to("hpu", non_blocking=True).tolist() == [1, 2]
