"""``habana_frameworks.torch``: importing it makes the ``hpu`` device available, as on a Gaudi."""

import torch

from . import device, hpu, ops

device.install(hpu)
ops.register()

# These are written for a torch that has the device, so they come after it.
from . import core, distributed, hpex, internal, utils  # noqa: E402

__all__ = ["core", "device", "distributed", "hpex", "hpu", "internal", "ops", "torch", "utils"]
