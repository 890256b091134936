"""rope-cpu-cache: the tables of vLLM's real rotary classes, built for a device that computes worse.

`tests/support/sides.py` is that device: what it computes, and how it rounds, is not what the CPU
makes of it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from types import SimpleNamespace

import pytest

from tests.support import standin

pytestmark = [pytest.mark.needs("torch"), pytest.mark.only("v0.26.0")]

PACKAGE = "vllm.model_executor.layers.rotary_embedding"
POSITIONS = 64
ON_THE_DEVICE = r"rows of \w+ are not what the CPU computes"

# How a class is made: head size, rotary dimension, positions, base, neox style, and its own.
COMMON = {
    "head_size": 16,
    "rotary_dim": 16,
    "max_position_embeddings": POSITIONS,
    "base": 10000.0,
    "is_neox_style": True,
}
YARN = {"scaling_factor": 4.0}
MROPE = {"mrope_section": [4, 2, 2]}
FACTORS = [1.0 + n / 8 for n in range(8)]
OWN = {
    "RotaryEmbeddingBase": {},
    "RotaryEmbedding": {},
    "LinearScalingRotaryEmbedding": {"scaling_factors": [1.0, 2.0]},
    "NTKScalingRotaryEmbedding": {"scaling_factor": 2.0, "mixed_b": 0.5},
    "DynamicNTKScalingRotaryEmbedding": {"scaling_factor": 2.0, "max_trained_positions": 32},
    "DynamicNTKAlphaRotaryEmbedding": {"scaling_alpha": 2.0},
    "XDRotaryEmbedding": {"scaling_alpha": 2.0, "xdrope_section": [2, 2, 2, 2]},
    "YaRNScalingRotaryEmbedding": YARN,
    "TeleChat3RoPEScaledRotaryEmbedding": YARN,
    "DeepseekScalingRotaryEmbedding": YARN,
    "DeepseekV4ScalingRotaryEmbedding": YARN,
    "Llama3RotaryEmbedding": {
        "scaling_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "orig_max_position": 32,
    },
    "Llama4VisionRotaryEmbedding": {},
    "Gemma4RotaryEmbedding": {},
    "MRotaryEmbedding": MROPE,
    "MRotaryEmbeddingInterleaved": MROPE,
    "Ernie4_5_VLRotaryEmbedding": MROPE,
    "Phi3LongRoPEScaledRotaryEmbedding": {
        "original_max_position_embeddings": 32,
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
    },
    "FourierRotaryEmbedding": {
        "init_cache": False,
        "num_key_value_heads": 2,
        "num_inv_freq": 8,
        "fope_sep_head": True,
        "fope_init_factor": 0.5,
    },
}
# Puts its tables on `cuda` by name.
NOT_ON_GAUDI = {"DualChunkRotaryEmbedding"}
HPU = [
    "HPURotaryEmbedding",
    "HPULinearScalingRotaryEmbedding",
    "HPUDynamicNTKScalingRotaryEmbedding",
    "HPUYaRNScalingRotaryEmbedding",
    "HPUDeepseekScalingRotaryEmbedding",
    "HPULlama3RotaryEmbedding",
    "HPUPhi3LongRoPEScaledRotaryEmbedding",
    "HPULlama4VisionRotaryEmbedding",
    "HPUMRotaryEmbedding",
]
MADE_AT_ONCE = [name for name in OWN if name != "FourierRotaryEmbedding"]


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """What the classes ask vLLM for as they are made."""
    standin.device()
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    phi3 = importlib.import_module(f"{PACKAGE}.phi3_long_rope_scaled_rope")
    model = SimpleNamespace(model_config=SimpleNamespace(max_model_len=POSITIONS))
    monkeypatch.setattr(phi3, "get_current_vllm_config", lambda: model)
    fope = importlib.import_module(f"{PACKAGE}.fope")
    monkeypatch.setattr(fope, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(fope, "get_tensor_model_parallel_rank", lambda: 0)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield


def classes():
    """All classes of the package that compute a table, by name."""
    package = importlib.import_module(PACKAGE)
    found = {}
    for module in pkgutil.iter_modules(package.__path__, f"{PACKAGE}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(value) and hasattr(value, "_compute_cos_sin_cache"):
                found[name] = value
    return found


def make(kind, name, dtype=None):
    import torch

    options = {**COMMON, **OWN[name], "dtype": dtype or torch.bfloat16}
    if name == "Llama4VisionRotaryEmbedding":
        options["dtype"] = torch.complex64
    if name == "MRotaryEmbeddingInterleaved":
        options["mrope_section"] = [2, 3, 3]
    return kind(**options)


@contextlib.contextmanager
def loading_onto(device):
    """As vLLM's loader makes a model."""
    import torch

    from tests.support.sides import Sides

    with Sides(), torch.device(device):
        yield


def tables(module):
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name.endswith("cos_sin_cache") or name == "inv_freq"
    }


def assert_as_on_the_cpu(module, reference):
    """Bit for bit the CPU's tables, on the device."""
    import torch

    from tests.support.sides import OnDevice

    found, expected = tables(module), tables(reference)
    assert found.keys() == expected.keys() != set()
    for name, table in found.items():
        plain = table.as_subclass(torch.Tensor)
        assert plain.dtype == expected[name].dtype
        assert plain.shape == expected[name].shape
        assert isinstance(table, OnDevice), f"{name} is not on the device"
        wrong = int((plain != expected[name]).reshape(len(plain), -1).any(dim=1).sum())
        assert not wrong, f"{wrong} rows of {name} are not what the CPU computes"
        assert name not in module.state_dict(), "the table would be looked for in a checkpoint"


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE_AT_ONCE)
@pytest.mark.red(ON_THE_DEVICE)
def test_tables_of_vllm(name):
    kind = classes()[name]
    with loading_onto("hpu"):
        module = make(kind, name)
    assert_as_on_the_cpu(module, make(kind, name))


@pytest.mark.needs("vllm_gaudi")
@pytest.mark.parametrize("name", HPU)
@pytest.mark.red(ON_THE_DEVICE)
def test_tables_of_the_plugin(name):
    plugin = importlib.import_module("vllm_gaudi.ops.hpu_rotary_embedding")
    kind = getattr(plugin, name)
    with loading_onto("hpu"):
        module = make(kind, name.removeprefix("HPU"))
    assert_as_on_the_cpu(module, make(kind, name.removeprefix("HPU")))


@pytest.mark.red(ON_THE_DEVICE)
def test_table_of_a_class_of_somebody_else():
    import torch

    class Cubic(classes()["RotaryEmbedding"]):
        def _compute_cos_sin_cache(self):
            angles = torch.arange(self.max_position_embeddings).float().pow(3)
            return torch.outer(angles, self._compute_inv_freq(self.base)).cos()

    with loading_onto("hpu"):
        module = make(Cubic, "RotaryEmbedding")
    assert_as_on_the_cpu(module, make(Cubic, "RotaryEmbedding"))


@pytest.mark.red(ON_THE_DEVICE)
def test_yarn_of_mrope():
    kind = classes()["MRotaryEmbedding"]
    with loading_onto("hpu"):
        module = kind(**COMMON, **MROPE, **YARN, dtype=importlib.import_module("torch").float32)
    assert_as_on_the_cpu(
        module, kind(**COMMON, **MROPE, **YARN, dtype=importlib.import_module("torch").float32)
    )


def fope(device, *, load):
    """FoPE, its weights loaded or filled in behind its back, after a forward pass."""
    import torch

    with loading_onto(device):
        module = make(classes()["FourierRotaryEmbedding"], "FourierRotaryEmbedding")
        weights = torch.Generator().manual_seed(3)
        values = [torch.randn(2, 8, 8, generator=weights, device="cpu") for _ in range(2)]
    with loading_onto("cpu"):
        for parameter, value in zip((module.sin_coef, module.cos_coef), values, strict=True):
            if load:
                parameter.weight_loader(parameter, value)
            else:
                parameter.data.copy_(value)
    return module


def run(module):
    import torch

    heads = torch.zeros(2, 2 * 16, dtype=torch.bfloat16)
    module.forward_native(torch.arange(2), heads, heads.clone())


@pytest.mark.parametrize("load", [True, False], ids=["weights loaded", "dummy weights"])
@pytest.mark.red(ON_THE_DEVICE)
def test_fope_which_needs_weights(load):
    module, reference = fope("hpu", load=load), fope("cpu", load=load)
    run(module)
    run(reference)
    assert_as_on_the_cpu(module, reference)


@pytest.mark.red(r"the table is built in the forward pass")
def test_fope_is_ready_before_the_forward_pass():
    """The forward pass is compiled; a graph of the device is no place for the CPU's work."""
    module, reference = fope("hpu", load=True), fope("cpu", load=True)
    module._compute_cos_sin_cache = lambda: pytest.fail("the table is built in the forward pass")
    run(module)
    run(reference)
    assert_as_on_the_cpu(module, reference)


# --- neighbours ----------------------------------------------------------------------------------


def test_no_class_is_forgotten():
    assert classes().keys() == OWN.keys() | NOT_ON_GAUDI


@pytest.mark.needs("vllm_gaudi")
def test_no_class_of_the_plugin_is_forgotten():
    plugin = importlib.import_module("vllm_gaudi.ops.hpu_rotary_embedding")
    made = [name for name in vars(plugin) if name.startswith("HPU") and "Rotary" in name]
    assert sorted(made) == sorted(HPU)


@pytest.mark.parametrize("name", OWN)
def test_without_a_device_tables_are_plain(name):
    """Loading onto the CPU, as before quantising there: nothing moves."""
    from tests.support.sides import OnDevice

    module = make(classes()[name], name)
    assert tables(module)
    assert not any(isinstance(table, OnDevice) for table in tables(module).values())
    assert {str(table.device) for table in tables(module).values()} == {"cpu"}


def test_the_table_itself():
    """The plain table against the formula, so that the comparisons above compare something."""
    import torch

    module = make(classes()["RotaryEmbedding"], "RotaryEmbedding", torch.float32)
    frequencies = 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)
    angles = torch.outer(torch.arange(POSITIONS).double(), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    torch.testing.assert_close(module.cos_sin_cache, expected, rtol=0, atol=1e-5)


def test_no_table_where_none_is_asked_for():
    kind = classes()["RotaryEmbedding"]
    module = kind(**COMMON, dtype=importlib.import_module("torch").bfloat16, init_cache=False)
    assert not hasattr(module, "cos_sin_cache")
