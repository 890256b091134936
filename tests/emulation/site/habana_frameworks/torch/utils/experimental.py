"""``habana_frameworks.torch.utils.experimental``: which card this is."""

import enum
import os

import torch


class synDeviceType(enum.IntEnum):
    synDeviceGaudi = 1
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType:
    """Gaudi 2, the card of the recipes; ``EMULATED_GAUDI=3`` for the other one's branches."""
    return {"2": synDeviceType.synDeviceGaudi2, "3": synDeviceType.synDeviceGaudi3}[
        os.environ.get("EMULATED_GAUDI", "2")
    ]


def _data_ptr(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()
