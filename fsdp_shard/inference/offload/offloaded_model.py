"""Keeps an offloaded model correct where transformers would read or change weights that are not in memory.

`model.device` is the device that computes, even if the first parameter is on meta. transformers creates tensors there
(such as a decoder's first tokens), but its own property looks at that parameter. Operations that need the weights, a
cast or `save_pretrained`, are rejected. Only a subclass can override a property, so a model's class is replaced, here
and nowhere else. An empty first parameter on the right device would also fix the device, but it would appear in
`named_parameters()` and `state_dict()`.
"""

from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from transformers import PreTrainedModel

from fsdp_shard.errors import RunError
from fsdp_shard.inference.offload.block_hooks import CANNOT_COPY

if TYPE_CHECKING:
    _Base = PreTrainedModel
else:
    _Base = object


class _OffloadedModel(_Base):
    """Overrides for a model with parameters on meta; its own class is the next base."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise RunError(
                f"The code of {type(self).__name__} uses weights outside of the module that has them, and they are on "
                f"meta, since they are read only for the passes of that module ({error}). Keep them in memory, by a "
                f"larger max_memory or a device_map that names it."
            ) from error

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        raise RunError(CANNOT_COPY)

    def float(self, *args: Any) -> Any:
        self._refuse_cast(torch.float32)
        return super().float(*args)  # type: ignore[no-untyped-call]  # untyped in transformers

    def double(self, *args: Any) -> Any:
        self._refuse_cast(torch.float64)
        return super().double(*args)

    def half(self, *args: Any) -> Any:
        self._refuse_cast(torch.float16)
        return super().half(*args)  # type: ignore[no-untyped-call]  # untyped in transformers

    def bfloat16(self) -> Any:
        self._refuse_cast(torch.bfloat16)
        return super().bfloat16()

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # it has overloads in torch
        for value in (*args, *kwargs.values()):
            if isinstance(value, (torch.dtype, torch.Tensor)):
                self._refuse_cast(value.dtype if isinstance(value, torch.Tensor) else value)
        return super().to(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().save_pretrained(*args, **kwargs)
        except ValueError as error:
            if "meta" not in str(error):
                raise
            raise RunError(
                f"{type(self).__name__} has weights on disk, which save_pretrained cannot write; fsdp-shard convert "
                f"{self.config.name_or_path or 'PATH'} TARGET writes all of them, in any format and dtype."
            ) from error

    def _refuse_cast(self, dtype: torch.dtype) -> None:
        """Raise RunError for a cast of parameters on meta, which are read in the requested dtype."""
        for param in self.parameters():
            if param.is_meta and param.is_floating_point() and param.dtype != dtype:
                raise RunError(
                    f"{type(self).__name__} has weights on disk, which are read in {_name(param.dtype)} for each pass, "
                    f"so it cannot become {_name(dtype)}; load it with dtype={_name(dtype)}."
                )


def make_offloaded(model: torch.nn.Module, device: torch.device) -> None:
    """Make `model` and the transformers models in it offloaded models with inputs on `device`."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(param.is_meta for param in module.parameters()):
            cls = type(module)
            names: dict[str, Any] = {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
            }
            if module.device.type == "meta":
                names["device"] = property(lambda _: device)
            module.__class__ = type(cls.__name__, (_OffloadedModel, cls), names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
