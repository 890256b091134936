"""``habana_frameworks.torch.core``: graph boundaries and set-up calls. Nothing is deferred here."""


def mark_step(*_args: object, **_options: object) -> None:
    """End the lazy graph: every operation has already run here."""


def hpu_initialize(model: object = None, *_args: object, **_options: object) -> object:
    """Inference set-up of the quantiser."""
    return model


def hpu_inference_set_env() -> None:
    """Inference set-up of the compiler."""
