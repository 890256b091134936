"""``torch.hpu.random``: the device draws from the CPU's generator here."""

import torch


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    torch.default_generator.set_state(new_state)
