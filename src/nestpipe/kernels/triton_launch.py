"""Starts of Triton kernels that cost the host little.

Triton binds the arguments of every start by name, asks which code they need and calls hooks: 10 to
40 us. A `Starter` lets it do so once for every kind of arguments, and then calls the code's own
launcher with them: a `Kind` is all that Triton compiles for. Which code runs, and so every bit of
the result, is the same. `NESTPIPE_TRITON_LAUNCH=ordinary` takes Triton's way always, as the twin.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

PROVEN = "3.6."
"""Versions of Triton whose launcher takes arguments as they are given here."""
MOST_KINDS = 256
"""Of the arguments of one kernel; further ones go Triton's way."""
MOST_NUMBERS = 4096
"""Of which the kinds are remembered."""
SWITCH = "NESTPIPE_TRITON_LAUNCH"
_INT32 = range(-(1 << 31), 1 << 31)
Kind = Hashable


class Constants:
    """What a kernel is compiled for, and the compiler's options, by name; made by `constants`."""

    __slots__ = ("named",)

    def __init__(self, named: dict[str, Any]) -> None:
        self.named = named


@cache
def constants(**named: Any) -> Constants:
    """One object for equal values, so that a start need not compare them."""
    return Constants(named)


class Code(NamedTuple):
    """What Triton has compiled, ready to be started."""

    launch: Callable[..., None]
    head: tuple[Any, ...]
    """Arguments behind grid and stream."""
    maps: tuple[tuple[Any, ...], ...] | None
    """Of each descriptor what its tensor map is made with; None: `launch` makes the maps itself."""
    constants: tuple[Any, ...]
    """The last arguments."""


class Starter:
    """Starts one kernel, whose parameters are descriptors, tensors, numbers and constants in turn.

    The launch is Triton's own where the fast way is not known to be right: `why_ordinary` says why.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.why_ordinary = _why_ordinary(kernel)
        self.codes: dict[Kind, Code | None] = {}
        """By kind; None: Triton's way."""
        self._kinds: dict[tuple[float | None, ...], tuple[Any, ...]] = {}
        if self.why_ordinary is None:
            self._driver: Any = None  # asked for where there is a GPU: not every import has one
            free = {p.name for p in kernel.params if p.do_not_specialize}
            self._names = [p.name for p in kernel.params if p.is_constexpr]
            numbers = [p.name for p in kernel.params if not p.is_constexpr]
            self._free = [name in free for name in numbers]

    def __call__(
        self,
        grid: tuple[int, ...],
        constants: Constants,
        descriptors: Sequence[TensorDescriptor],
        tensors: Sequence[Tensor | None],
        numbers: tuple[float | None, ...],
    ) -> None:
        """Start the kernel on the current stream; None leaves an argument out."""
        if self.why_ordinary is not None:
            other = _other_device(tensors)
            with torch.cuda.device(other) if other is not None else nullcontext():
                self.start_ordinarily(grid, constants, descriptors, tensors, numbers)
            return
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        types = [None if x is None else (x.dtype, x.get_device()) for x in tensors]
        low_bits = reduce(or_, filter(None, pointers), 0)
        for descriptor in descriptors:
            types.append((descriptor.base.dtype, descriptor.block_shape[1]))
        if self._driver is None:
            self._driver = triton.runtime.driver.active
        device = self._driver.get_current_device()
        kinds = self._kinds.get(numbers)
        if kinds is None:
            kinds = self._kinds_of(numbers, len(tensors) + len(descriptors))
        kind = (constants, device, kinds, *types)
        code = self.codes.get(kind)
        if code is None or low_bits & 15:
            other = _other_device(tensors)
            with torch.cuda.device(other) if other is not None else nullcontext():
                compiled = self.start_ordinarily(grid, constants, descriptors, tensors, numbers)
            known = len(self.codes) == MOST_KINDS or kind in self.codes
            if not (known or low_bits & 15 or other is not None):
                self.codes[kind] = self._code_of(compiled, constants)
            return
        rows, columns, planes = (*grid, 1, 1)[:3]
        stream = self._driver.get_current_stream(device)
        try:
            first = descriptors if code.maps is None else self._tensor_maps(code.maps, descriptors)
            code.launch(
                rows, columns, planes, stream, *code.head, *first, *pointers, *numbers,
                *code.constants,
            )  # fmt: skip
        except (TypeError, ValueError, AttributeError, OverflowError, SystemError) as error:
            self._give_up(error)
            self.start_ordinarily(grid, constants, descriptors, tensors, numbers)

    def start_ordinarily(
        self,
        grid: tuple[int, ...],
        constants: Constants,
        descriptors: Sequence[TensorDescriptor],
        tensors: Sequence[Tensor | None],
        numbers: tuple[float | None, ...],
    ) -> Any:
        """Triton's own way, the twin; the code that it chose."""
        return self.kernel[grid](*descriptors, *tensors, *numbers, **constants.named)

    def _kinds_of(self, numbers: tuple[float | None, ...], first: int) -> tuple[Any, ...]:
        """What Triton compiles for, of each number: its type, and whether it is 1 or has a 16."""
        kinds: list[Any] = []
        for free, number in zip(self._free[first:], numbers, strict=True):
            if isinstance(number, int):
                kinds.append(number in _INT32)
                if not free:
                    kinds.append("one" if number == 1 else number & 15 == 0)
            else:
                kinds.append(number.__class__)
        if len(self._kinds) >= MOST_NUMBERS:  # batches have their own
            self._kinds.clear()
        self._kinds[numbers] = made = tuple(kinds)
        return made

    def _tensor_maps(
        self, maps: tuple[tuple[Any, ...], ...], descriptors: Sequence[TensorDescriptor]
    ) -> list[Any]:
        """Descriptors as the copy engine reads them, each with its shape and strides."""
        fill, made = self._driver.utils.fill_tma_descriptor, []
        for known, of in zip(maps, descriptors, strict=True):
            made.append(fill(of.base.data_ptr(), *known, of.shape, of.strides, 0))
            made += of.shape
            made += of.strides
        return made

    def _code_of(self, compiled: Any, constants: Constants) -> Code | None:
        """None: what Triton returned is not what is known here."""
        try:
            last = tuple(constants.named[name] for name in self._names)
            if inner := _inner_code(compiled, last):
                return inner
            head = (compiled.function, compiled.packed_metadata, None, None, None)
            return Code(compiled.run, head, None, last)
        except (AttributeError, ImportError, KeyError, ValueError) as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self.why_ordinary = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"the kernel {self.kernel.__name__} is started Triton's way from now on, which costs "
            f"the host more: {self.why_ordinary}",
            RuntimeWarning,
            stacklevel=3,
        )


def _inner_code(compiled: Any, last: tuple[Any, ...]) -> Code | None:
    """The compiled launcher inside of Triton's Python around it; None: not what is known here.

    That Python allocates memory where a kernel wants some, calls hooks and makes tensor maps.
    """
    outer, metas = compiled.run, getattr(compiled.metadata, "tensordesc_meta", None) or []
    launch = getattr(outer, "launch", None)
    if launch is None or outer.global_scratch_size or outer.profile_scratch_size:
        return None
    if metas:
        names = launch.__code__.co_freevars
        if "launcher" not in names or any(meta is None or meta["fp4_padded"] for meta in metas):
            return None
        launch = launch.__closure__[names.index("launcher")].cell_contents
    flags = (outer.launch_cooperative_grid, outer.launch_pdl)
    head = (compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None)
    return Code(launch, head, tuple(map(_known_of_map, metas)), last)


def _known_of_map(meta: dict[str, Any]) -> tuple[Any, ...]:
    """What a tensor map is made with, besides address, shape and strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return meta["swizzle"], meta["elem_size"], element, meta["block_size"]


def _other_device(tensors: Sequence[Tensor | None]) -> torch.device | None:
    """Where the tensors are, if that is not the current GPU; None: they are here."""
    given = next((x for x in tensors if x is not None and x.is_cuda), None)
    if given is None or given.get_device() == torch.cuda.current_device():
        return None
    return given.device


def _why_ordinary(kernel: Any) -> str | None:
    """Why a kernel is started Triton's way; None: it need not be."""
    if os.environ.get(SWITCH) == "ordinary":
        return f"{SWITCH} is set"
    if not isinstance(kernel, JITFunction):
        return "the kernel is interpreted"
    if not triton.__version__.startswith(PROVEN):
        return f"Triton {triton.__version__} is not {PROVEN}x"
    return None
