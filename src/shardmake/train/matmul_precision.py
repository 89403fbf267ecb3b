"""Keep matrix products of fp32 in fp32: Accelerate turns TF32 on for compiled models."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_matmul_precision() -> Iterator[None]:
    """Keep the precision of fp32 matrix products on GPUs while an Accelerator is created.

    For a compiled fp32 model, Accelerate 1.15 turns TF32 on through torch's older switch, also if transformers has just
    turned it off. It is turned off by the same switch, because torch refuses values of the two that differ.
    """
    products = torch.backends.cuda.matmul
    had_tf32 = products.fp32_precision == "tf32"
    yield
    if products.fp32_precision == "tf32" and not had_tf32:
        products.allow_tf32 = False
