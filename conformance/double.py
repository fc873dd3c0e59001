# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Float64 all the way through a Transformers model.

Norms, routers and eager softmax cast to float32 inside, so a model in float64 agrees with itself only to about 1e-6.
[`keep_double`] turns those casts of float64 tensors off, which makes comparisons to 1e-10 possible. Slow; for tests
and checks only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions of two tensors, of which the second may be in float32: rotary frequencies times positions, and positions of
# patches between those that were learned.
_OF_TWO = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.nn.functional.grid_sample)
_LOW = (torch.float32, torch.float16, torch.bfloat16)


class keep_double(TorchFunctionMode):
    """
    While active, float64 tensors stay float64 where code asks for a lower precision.

    Example:

    ```python
    >>> import torch
    >>> with keep_double():
    ...     torch.ones(1, dtype=torch.float64).float().dtype
    torch.float64

    ```
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64:
            return func(*args, **kwargs)
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return tensor
        if kwargs.get("dtype") in _LOW:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(
                torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value for value in args
            )
        second = args[1] if len(args) > 1 else None
        if isinstance(second, torch.Tensor):
            casts = func is torch.Tensor.to and second.is_floating_point()
            if casts or (func in _OF_TWO and second.dtype in _LOW):
                args = (tensor, second.double(), *args[2:])
        return func(*args, **kwargs)
