"""The Hopper attention kernel on the host: its own source, with a small model of Gluon under it.

Partitions are threads of which one runs at a time; who goes on is drawn. Copies and products run
at drawn moments between their start and the wait for them. Told as errors: a deadlock, memory that
changes under a product, a read of memory whose copy is not done, a store that no fence shows to
the copy engine, and a product's result that is used before it is waited for.

It knows nothing of registers, of swizzles, nor of the compiler.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SOURCE = Path(__file__).parents[2] / "src" / "nestpipe" / "kernels" / "attention"
MODULES = ("fused_pairs", "hopper_kernel")


class Wrong(AssertionError):  # noqa: N818  what it says of a kernel
    """The kernel did what would be wrong, or luck, on a GPU."""


class Int(int):
    """A whole number of the GPU: division goes towards zero."""

    def to(self, _: Any) -> Int:
        return self

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            return torch.div(torch.tensor(int(self)), other, rounding_mode="trunc")
        return Int(abs(int(self)) // abs(int(other)) * (1 if (self < 0) == (other < 0) else -1))

    def __mod__(self, other: int) -> Int:
        return Int(int(self) - int(other) * int(self // other))

    def __sub__(self, other: Any) -> Any:
        return _int(int(self) - other)

    def __add__(self, other: Any) -> Any:
        return _int(int(self) + other)

    def __mul__(self, other: Any) -> Any:
        return _int(int(self) * other)

    def __and__(self, other: Any) -> Any:
        return _int(int(self) & int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Any:
        return _int(other - int(self))

    def __neg__(self) -> Int:
        return Int(-int(self))


def _int(value: Any) -> Any:
    return Int(value) if type(value) is int else value


@dataclass(frozen=True)
class Pointer:
    """An address inside a tensor."""

    base: Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + other)

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset - other)

    def to(self, _: Any) -> Pointer:
        return self

    def values(self, index: Any = 0) -> Any:
        place = self.offset + index
        flat = self.base.reshape(-1)
        if isinstance(place, Tensor):
            return flat[place.clamp(0, len(flat) - 1).long()]
        return flat[place]


class Machine:
    """One program's threads, barriers, copies and products."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.haste = self.draw.choice([0.02, 0.3])
        self.turn = threading.Condition()
        self.current: int | None = None
        self.order: list[int] = []
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.copies: list[Callable[[], None]] = []
        self.products: dict[int, list[Product]] = {}
        self.failure: BaseException | None = None
        self.unfenced: dict[int, set[int]] = {}

    def me(self) -> int:
        return int(threading.current_thread().name)

    def run(self, works: list[Callable[[], None]]) -> None:
        threads = [
            threading.Thread(target=self._run, args=(work,), name=str(number))
            for number, work in enumerate(works)
        ]
        self.products = {number: [] for number in range(len(works))}
        self.unfenced = {number: set() for number in range(len(works))}
        self.waiting = {number: lambda: True for number in range(len(works))}
        self.order = list(range(len(works)))
        for thread in threads:
            thread.start()
        with self.turn:
            self._choose()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        while self.copies:
            raise Wrong("a copy is on its way when the program ends")

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._sleep()
            work()
            self.finish(0)
        except BaseException as error:  # noqa: BLE001  the other threads must end too
            self.failure = self.failure or error
        with self.turn:
            self.waiting.pop(self.me(), None)
            self._choose()

    def until(self, ready: Callable[[], bool]) -> None:
        """Let others go on; come back when `ready`."""
        with self.turn:
            self.waiting[self.me()] = ready
            self._choose()
        self._sleep()

    def _sleep(self) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.current == self.me() or self.failure is not None)
            if self.failure is not None:
                raise Wrong("another thread failed")

    def _choose(self) -> None:
        """Some copies and products, then a thread that can go on."""
        while True:
            ready = [name for name, test in self.waiting.items() if test()]
            pending = [x for x in self.products.values() if x]
            if self.failure is not None or not self.waiting:
                self.current = None
                break
            if (self.copies or pending) and (not ready or self.draw.random() < self.haste):
                self._progress(pending)
            elif ready:
                # One stays behind for long, so that others come as far ahead as they may.
                if self.draw.random() < 0.1:
                    self.draw.shuffle(self.order)
                self.current = max(ready, key=self.order.index)
                break
            else:
                self.failure = Wrong("deadlock: everybody waits")
        self.turn.notify_all()

    def _progress(self, pending: list[list[Product]]) -> None:
        number = self.draw.randrange(len(self.copies) + len(pending))
        try:
            if number < len(self.copies):
                self.copies.pop(number)()
            else:
                pending[number - len(self.copies)].pop(0).compute()
        except Wrong as error:
            self.failure = error

    def finish(self, most: int) -> None:
        """Products of this thread until `most` are left."""
        mine = self.products[self.me()]
        while len(mine) > most:
            mine.pop(0).compute()


@dataclass(eq=False)
class Memory:
    """Shared memory; parts share what `whole` holds."""

    machine: Machine
    whole: Tensor
    view: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    def index(self, number: int) -> Memory:
        assert 0 <= number < len(self.view)
        return Memory(self.machine, self.whole, self.view[number])

    def slice(self, start: int, length: int) -> Memory:
        return Memory(self.machine, self.whole, self.view[start : start + length])

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.machine, self.whole, self.view.permute(order))

    def load(self, _: Any) -> Tensor:
        return self.view.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.view.shape
        assert value.dtype == self.view.dtype
        self.view.copy_(value)
        self.machine.unfenced[self.machine.me()].add(self.view.data_ptr())

    def bytes(self) -> Tensor:
        return self.view.contiguous().view(torch.int16).clone()


@dataclass(eq=False)
class Product:
    """One asynchronous product."""

    a: Any
    b: Any
    sum: Tensor | Product | None
    value: Tensor | None = None
    seen: list[Tensor] = field(default_factory=list)
    waited: bool = False

    def memories(self) -> list[Memory]:
        return [x for x in (self.a, self.b) if isinstance(x, Memory)]

    def compute(self) -> None:
        for before, memory in zip(self.seen, self.memories(), strict=True):
            if not torch.equal(before, memory.bytes()):
                raise Wrong("memory changes under a product")
        a = self.a.view if isinstance(self.a, Memory) else self.a
        added = self.sum.value if isinstance(self.sum, Product) else self.sum
        product = a.float() @ self.b.view.float()
        self.value = product if added is None else product + added


class Barrier:
    """An mbarrier."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.count, self.phase, self.left, self.bytes = machine, 0, 0, 0, 0

    def index(self, _: int) -> Barrier:
        return self

    def arrive(self, number: int = 1) -> None:
        self.left -= number
        if self.left < 0:
            raise Wrong("more arrivals than a barrier counts")
        self._check()

    def done(self, number: int) -> None:
        self.bytes -= number
        self._check()

    def _check(self) -> None:
        if not self.left and not self.bytes:
            self.phase, self.left = self.phase + 1, self.count


class Barriers:
    def __init__(self, machine: Machine, number: int) -> None:
        self.all = [Barrier(machine) for _ in range(number)]

    def index(self, number: int) -> Barrier:
        return self.all[number]


@dataclass(frozen=True)
class Descriptor:
    """Rows of all heads; what is outside reads as zeros."""

    rows_TX: Tensor
    rows: int
    width: int
    layout: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.rows_TX.dtype

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=self.rows * self.width * 2)

    def read(self, row: int, column: int) -> Tensor:
        assert row >= 0
        found = self.rows_TX.new_zeros(self.rows, self.width)
        there = self.rows_TX[row : row + self.rows, column : column + self.width]
        found[: there.shape[0], : there.shape[1]] = there
        return found


class Gluon:
    """What the kernel's module asks of Gluon, Triton and their languages."""

    def __init__(self, seed: int) -> None:
        self.seed, self.program, self.programs = seed, 0, 1
        self.machine = Machine(seed)

    def language(self) -> ModuleType:
        made = ModuleType("language")
        vars(made).update(
            constexpr=lambda value=None: value, float32=torch.float32, int32=torch.int32,
            int64=torch.int64, where=self.where, minimum=self.least, maximum=self.most,
            arange=lambda a, b, *_: torch.arange(a, b), static_range=range, load=self.load,
            store=self.store, cdiv=lambda a, b: Int(-(-int(a) // int(b))),
            program_id=lambda _: Int(self.program), num_programs=lambda _: Int(self.programs),
            zeros=lambda shape, *_: torch.zeros(shape), zeros_like=torch.zeros_like,
            convert_layout=lambda x, _: x, thread_barrier=lambda: None,
            inline_asm_elementwise=self.assembly, allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize, static_assert=self.certain, to_tensor=Int,
            sum=lambda x, axis: x.sum(axis),
            **{name: lambda *_: None for name in (
                "NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout")},
        )  # fmt: skip
        return made

    def hopper(self) -> ModuleType:
        made = ModuleType("hopper")
        barrier = SimpleNamespace(
            init=self.init, wait=self.wait, expect=self.expect, arrive=self.arrive,
            MBarrierLayout=lambda: None,
        )  # fmt: skip
        vars(made).update(
            fence_async_shared=self.fence, mbarrier=barrier,
            tma=SimpleNamespace(async_copy_global_to_shared=self.copy),
            warpgroup_mma=self.product, warpgroup_mma_wait=self.wait_products,
        )  # fmt: skip
        return made

    @staticmethod
    def certain(test: bool) -> None:
        assert test

    @staticmethod
    def where(test: Any, a: Any, b: Any) -> Any:
        if isinstance(test, Tensor):
            return torch.where(test, a, b)
        return a if test else b

    @staticmethod
    def least(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return a.clamp(max=b)
        return b.clamp(max=a) if isinstance(b, Tensor) else Int(min(a, b))

    @staticmethod
    def most(a: Any, b: Any) -> Any:
        return a.clamp(min=b) if isinstance(a, Tensor) else Int(max(a, b))

    @staticmethod
    def load(place: Pointer) -> Any:
        found = place.values()
        return Int(found) if found.ndim == 0 and not found.is_floating_point() else found

    @staticmethod
    def store(place: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask.expand_as(value)
        flat = place.base.view(-1)
        assert flat[place.offset[mask]].isnan().all(), "written twice"
        flat[place.offset[mask]] = value[mask]

    @staticmethod
    def assembly(text: str, _: str, given: list[Any], **__: Any) -> Any:
        if text == "and.b32 $0, $1, 0;":
            return Int(0)
        if "tanh" in text:
            return torch.tanh(given[0])
        table, index = given[:2]
        if "bfind" in text:
            bits = torch.zeros_like(index)
            for power in range(31):
                bits += index >= 1 << power
            index = bits.clamp(max=given[2])
        return table.values(index)

    def allocate(self, kind: Any, shape: list[int], _: Any) -> Any:
        if kind == torch.int64:
            made = Barriers(self.machine, shape[0])
            return made.all[0] if len(shape) == 1 else made
        whole = torch.full(shape, float("nan"), dtype=kind)
        return Memory(self.machine, whole, whole)

    def specialize(self, works: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(works) - 1 == len(warps) == len(registers)
        self.machine.run([lambda f=f, given=given: f(*given) for f, given in works])

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def wait(self, barrier: Barrier, phase: int) -> None:
        self.machine.until(lambda: barrier.phase & 1 != phase)

    def expect(self, barrier: Barrier, number: int) -> None:
        barrier.bytes += number
        barrier.arrive()

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            if self.machine.unfenced[self.machine.me()]:
                raise Wrong("memory is given back without a fence")
            barrier.arrive(count)
        self.machine.until(lambda: True)

    def fence(self) -> None:
        if threading.current_thread().name.isdigit():
            self.machine.unfenced[self.machine.me()].clear()

    def copy(
        self, of: Descriptor, place: list[int], barrier: Barrier, into: Memory, pred: bool = True
    ) -> None:
        assert pred
        into.view.fill_(float("nan"))

        def land() -> None:
            into.view.copy_(of.read(int(place[0]), int(place[1])))
            barrier.done(of.block_type.nbytes)

        self.machine.copies.append(land)

    def product(
        self, a: Any, b: Memory, added: Any, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        assert is_async
        machine = self.machine
        if machine.unfenced[machine.me()]:
            raise Wrong("a product may read memory that was stored to without a fence")
        if isinstance(a, Product):
            raise Wrong("an operand is used before it is waited for")
        made = Product(a, b, added if use_acc else None)
        assert tuple(a.shape)[1] == b.shape[0]
        made.seen = [memory.bytes() for memory in made.memories()]
        machine.products[machine.me()].append(made)
        machine.until(lambda: True)
        return made

    def wait_products(self, most: int, given: list[Any]) -> Any:
        self.machine.until(lambda: True)
        self.machine.finish(most)
        mine = self.machine.products[self.machine.me()]
        found = []
        for one in given:
            if isinstance(one, Product) and one in mine:
                raise Wrong("a product is not done after the wait for it")
            found.append(one.value if isinstance(one, Product) else one)
        return found[0] if len(found) == 1 else found


def load_kernel(gluon: Gluon) -> dict[str, ModuleType]:
    """The kernel's modules over this Gluon, beside those that are imported."""

    def jit(function: Any = None, **_: Any) -> Any:
        return function if function is not None else (lambda later: later)

    language, hopper = gluon.language(), gluon.hopper()
    base = "triton.experimental.gluon"
    stubs: dict[str, Any] = {"triton": ModuleType("triton"), "triton.language": language}
    for name in ("triton.experimental", base, f"{base}.language", f"{base}.language.nvidia"):
        stubs[name] = ModuleType(name)
    vars(stubs["triton"]).update(jit=jit, language=language, __path__=[])
    vars(stubs[base]).update(jit=jit, language=language)
    stubs[f"{base}.language"] = language
    stubs[f"{base}.language.nvidia.hopper"] = hopper
    loaded: dict[str, ModuleType] = {}
    prefix = "nestpipe.kernels.attention."
    with mock.patch.dict(sys.modules, stubs):
        for name in MODULES:
            spec = spec_from_file_location(prefix + name, SOURCE / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[prefix + name] = loaded[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
    return loaded


def attend(
    pass_: dict[str, Any],
    rows: tuple[Tensor, ...],
    samples: tuple[Tensor, Tensor | None, int],
    numbers: tuple[float, float, int | None],
    *,
    programs: int,
    seed: int,
    tables: tuple[Any, ...] = (None, None, None, None, None, 0),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The sums over b, over c, and by bucket of one pass; rows are x, y, b and c, (T, H, A).

    NaN stands where nothing was written.
    """
    gluon = Gluon(seed)
    kernel = load_kernel(gluon)["hopper_kernel"]
    (total, heads, width), (offsets_B, targets_B, longest) = rows[0].shape, samples
    half_scale, inverse_norm, window = numbers
    tile = pass_["N"]
    flat = [x.reshape(total, heads * width) for x in rows]
    given = [Descriptor(x, r, width) for x, r in zip(flat, (64, 64, tile, tile), strict=True)]
    outs = [torch.full((total, heads, width), float("nan")).bfloat16() for _ in range(2)]
    blocks = -(-longest // 128)
    units = (len(offsets_B) - 1) * heads
    *tensors, side = tables
    pointers = [None if x is None else Pointer(x) for x in (offsets_B, targets_B, *tensors)]
    gluon.programs = min(programs, units * blocks)
    constants = {"P": 1, "Q": 1, "HELD": False, "BUCKETS": 0, **pass_}
    sums_HXQ = torch.full((heads, units // heads * blocks * 2, constants["BUCKETS"]), float("nan"))
    written = [Pointer(x) for x in (*outs, sums_HXQ)]
    for program in range(gluon.programs):
        gluon.program = program
        gluon.machine = Machine(seed + program)
        kernel.attend_by_groups(
            *given, *written, *pointers, side, half_scale, inverse_norm, window,
            Int(units), Int(heads), Int(blocks), Int(3), *[Int(width)] * 4, A=width, **constants,
        )  # fmt: skip
    found_b, found_c = outs
    return (
        found_b if constants["GRAD"] else None,
        found_c if constants["VALUES"] else None,
        sums_HXQ if constants["BUCKETS"] else None,
    )
