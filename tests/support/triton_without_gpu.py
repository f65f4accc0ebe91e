"""Triton's kernels as the host sees them, with neither a GPU nor a compiler: starts are noted.

For a process of its own: kernels that were started here do nothing ever after. Where Triton is
installed its own code binds arguments and chooses what to compile; else a stand-in takes its place.

    python tests/support/triton_without_gpu.py

prints what a block of an encoder costs the host, in every form: us of processor time, starts and
operations of torch. Products are counted, not computed.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a kernel, as its launcher gets it."""

    code: Code
    grid: tuple[int, ...]
    given: tuple[Any, ...]

    @property
    def arguments(self) -> list[Any]:
        """What the device would get: an address for a tensor, a tuple for a descriptor."""
        return [plain(argument) for argument in self.given]


@dataclass(eq=False)
class Code:
    """What would have been compiled for one kind of arguments."""

    name: str
    starts: list[Start]
    function: int = 7
    packed_metadata: tuple[int, ...] = (4, 1, 0)
    metadata: Any = field(default_factory=lambda: SimpleNamespace(num_warps=4))

    def launch_metadata(self, *_: Any) -> None:
        """Nothing."""

    def __post_init__(self) -> None:
        self.run: Any = self.note

    def note(self, x: int, y: int, z: int, *arguments: Any) -> None:
        """Note the start; behind the grid come six values of the launcher's own."""
        self.starts.append(Start(self, (x, y, z), arguments[6:]))

    def note_inside(self, x: int, y: int, z: int, *arguments: Any) -> None:
        """Note what the compiled launcher gets: ten values of its own, then tensor maps first."""
        self.starts.append(Start(self, (x, y, z), arguments[10:]))


def plain(argument: Any) -> Any:
    """An argument as numbers alone."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if hasattr(argument, "block_shape"):
        sizes = (argument.shape, argument.strides, argument.block_shape)
        return (argument.base.data_ptr(), *map(tuple, sizes), argument.padding)
    return argument


def install() -> list[Start]:
    """From now on kernels are started into the list that this returns."""
    starts: list[Start] = []
    (_take_over if HAS_TRITON else _stand_in)(starts)
    return starts


def _take_over(starts: list[Start]) -> None:
    """Triton's own code, up to the compiler."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    def compile_(self: Any, key: Any, signature: Any, device: int, *_: Any) -> Code:
        code = Code(self.__name__, starts)
        code.run = _launcher(code, signature)
        self.device_caches[device][0][key] = code
        return code

    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(fill_tma_descriptor=_fill),
    )
    triton.runtime.driver.set_active(active)
    triton.runtime.jit.JITFunction._do_compile = compile_


def _launcher(code: Code, signature: dict[str, Any]) -> Any:
    """Triton's own, around one that is not compiled."""
    from triton.backends.nvidia import driver  # pyright: ignore[reportMissingImports]

    described = [x for x in signature.values() if isinstance(x, str) and "tensordesc" in x]
    metas = [
        {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, n], "fp4_padded": False}
        for n, _ in enumerate(described)
    ]
    code.metadata.tensordesc_meta = metas
    launcher = object.__new__(driver.CudaLauncher)
    launcher.launch = driver.wrap_handle_tensordesc(code.note_inside, signature, metas)
    launcher.launch_cooperative_grid, launcher.launch_pdl = 0, 0
    launcher.num_ctas = 1
    for name in ("global_scratch", "profile_scratch"):
        setattr(launcher, f"{name}_size", 0)
        setattr(launcher, f"{name}_align", 1)
    return launcher


def _fill(*given: Any) -> tuple[Any, ...]:
    """A tensor map: what it is made of."""
    return tuple(tuple(x) if isinstance(x, list) else x for x in given)


@dataclass
class Parameter:
    """Of a kernel, with the names of Triton's own."""

    name: str
    is_constexpr: bool
    do_not_specialize: bool


class JITFunction:
    """A kernel with one code for all arguments."""

    def __init__(self, function: Any, free: tuple[str, ...], starts: list[Start]) -> None:
        self.fn, self.__name__ = function, function.__name__
        given = inspect.signature(function).parameters.values()
        self.params = [
            Parameter(of.name, "constexpr" in str(of.annotation), of.name in free) for of in given
        ]
        self.code = Code(self.__name__, starts)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Code]:
        def start(*arguments: Any, **named: Any) -> Code:
            last = [named[p.name] for p in self.params[len(arguments) :]]
            self.code.run(*(*grid, 1, 1)[:3], *[None] * 6, *arguments, *last)
            return self.code

        return start


def _stand_in(starts: list[Start]) -> None:
    """Modules with what kernels ask for when they are defined, and a `Starter` when it starts."""

    import_module("torch._dynamo")  # looks for what Triton has besides

    def jit(function: Any = None, *, do_not_specialize: tuple[str, ...] = (), **_: Any) -> Any:
        if function is None:
            return lambda later: JITFunction(later, do_not_specialize, starts)
        return JITFunction(function, do_not_specialize, starts)

    class TensorDescriptor:
        pass

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    made = {
        "triton": {"jit": jit, "__version__": "3.6.0", "__path__": []},
        "triton.language": {"constexpr": lambda value: SimpleNamespace(value=value)},
        "triton.errors": {"TritonError": RuntimeError},
        "triton.runtime": {"driver": SimpleNamespace(active=active), "__path__": []},
        "triton.runtime.jit": {"JITFunction": JITFunction},
        "triton.tools": {"__path__": []},
        "triton.tools.tensor_descriptor": {"TensorDescriptor": TensorDescriptor},
    }
    for name, content in made.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """The host's rows may go to the kernels, gradients of biases as well."""
    from nestpipe.kernels.attention import bias_gradient, fused

    def yes(*_: Any) -> bool:  # a mock would take its time
        return True

    def nothing(*_: Any) -> None:
        return None

    def no_error(*_: Any) -> int:
        return 0

    with (
        mock.patch("nestpipe.models.sequence.chosen_kernels", yes),
        mock.patch.object(fused, "_why_not_fused", nothing),
        mock.patch.object(bias_gradient, "has_kernel", yes),
        mock.patch.object(bias_gradient, "launch", no_error),
    ):
        yield


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def encoder_pass(blocks: int, **given: Any) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
    """An encoder's forward pass, and both, in bfloat16 on eight rows."""
    from nestpipe.models import Hstu, HstuConfig, Tokens
    from nestpipe.models.protocol import in_precision

    sizes: dict[str, Any] = {"dim": 32, "heads": 2, "attention_dim": 16, "value_dim": 16}
    encoder = Hstu(HstuConfig(blocks=blocks, max_len=16, **sizes | given))
    draws_B = torch.tensor([5, 6]) if encoder.config.dropout else None
    tokens = Tokens(torch.tensor([5, 3]), None, torch.arange(8) * 9, draws_B=draws_B)
    rows_TD = torch.randn(8, 32, requires_grad=True)

    def forward() -> Tensor:
        with in_precision(rows_TD.device, "bf16"):
            return encoder(rows_TD, tokens)

    def both() -> None:
        encoded_TD = forward()
        leaves = [rows_TD, *encoder.parameters()]
        torch.autograd.grad(encoded_TD, leaves, torch.ones_like(encoded_TD))

    return forward, both


def counts_of_a_block(starts: list[Start], **given: Any) -> dict[str, tuple[int, int]]:
    """Starts and operations of a further block, forward and both."""
    found: dict[int, list[tuple[int, int]]] = {}
    for blocks in (2, 3):
        found[blocks] = []
        for work in encoder_pass(blocks, **given):
            work()
            starts.clear()
            with Operations() as operations:
                work()
            found[blocks].append((len(starts), operations.count))
    names = ("forward", "both")
    return {
        name: (more[0] - less[0], more[1] - less[1])
        for name, less, more in zip(names, found[2], found[3], strict=True)
    }


def us_of_a_block(starts: list[Start], **given: Any) -> tuple[float, ...]:
    """Processor time of a further block, forward and both: the least of many."""
    taken: dict[int, list[float]] = {}
    for blocks in (2, 10):
        taken[blocks] = []
        for work in encoder_pass(blocks, **given):
            least = float("inf")
            for _ in range(300):
                starts.clear()
                began = time.thread_time()
                work()
                least = min(least, time.thread_time() - began)
            taken[blocks].append(least)
    return tuple(1e6 * (b - a) / 8 for a, b in zip(taken[2], taken[10], strict=True))


def _products_cost_nothing() -> torch.library.Library:
    """A GPU computes them."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "CPU")
        library.impl("addmm", lambda _, a, b: a.new_empty(a.shape[0], b.shape[1]), "CPU")
    return library


def main() -> None:
    """One line for each form."""
    starts, kept = install(), _products_cost_nothing()
    assert kept is not None
    torch.set_num_threads(1)
    way = os.environ.get("NESTPIPE_TRITON_LAUNCH", "direct")
    with kernels_everywhere():
        for kind, steps, buckets in itertools.product(
            ("hstu", "fuxi"), ("steps", "auto"), ((0, 0), (64, 0), (64, 32))
        ):
            names = ("position_buckets", "time_buckets")
            given = {"kind": kind, "pointwise": steps, **dict(zip(names, buckets, strict=True))}
            if kind == "fuxi" and (steps == "auto" or not buckets[0]):
                continue
            forward, both = us_of_a_block(starts, **given)
            counts = counts_of_a_block(starts, **given)["both"]
            about = f"{kind}, biases {buckets}, launches {way}, {steps}"
            print(
                f"{about}: {forward:.0f} us forward, {both:.0f} both; starts, operations {counts}"
            )


if __name__ == "__main__":
    main()
