"""The ``hccl`` backend of ``torch.distributed``, on gloo: real data between processes."""

import datetime

import torch.distributed as dist


def _create(
    store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


dist.Backend.register_backend("hccl", _create, devices=["cpu", "hpu"])
