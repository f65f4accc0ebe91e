"""PTX of a kernel for Hopper on the host, instruction by instruction: what the compiler has made.

A warp runs until it waits; who goes on, and when copies of the copy engine land, is drawn. Products
of warp groups read memory when they are issued and write registers when they are waited for. Told
as errors: a deadlock; registers or memory that change under a product, or are used before it is
done; a product or a copy that meets stores which no fence shows to it; loads and stores outside of
tensors; registers that `setmaxnreg` asks for and nobody gives back; barriers used against their
rules; branches within a warp.

It knows neither the assembler nor time: what ptxas makes of this code is not seen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = Any
Work = Callable[["Warp"], Any]
LANES = 32
SHARED_BYTES = 232448
REGISTERS = 65536
GLOBAL = 0x7F0000000000
PARAMETERS = 0x100000000
_LANE = np.arange(LANES, dtype=np.uint32)
_KIND = {"f": "f", "u": "u", "s": "i", "b": "u"}
_PLAIN = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
            "gt": np.greater, "ge": np.greater_equal}  # fmt: skip


class Wrong(AssertionError):  # noqa: N818  what it says of a kernel
    """The code did what would be wrong, or luck, on a GPU."""


class TensorMap(NamedTuple):
    """What the copy engine is told of a tensor; the innermost dimension first."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes; of the innermost dimension: its element's."""
    box: tuple[int, ...]
    swizzle: int
    """Bytes of a line within which 16 bytes change places; 0: none do."""


class Memory:
    """Global memory: tensors with gaps between them."""

    def __init__(self, size: int = 1 << 25) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.there = np.zeros(size, bool)
        self.end = 256

    def put(self, values: Array) -> int:
        """The address of a copy of them."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        start = self.end
        self.bytes[start : start + flat.size] = flat
        self.there[start : start + flat.size] = True
        self.end = start + (flat.size + 255) // 256 * 256 + 256
        assert self.end < len(self.bytes), "more memory is needed"
        return GLOBAL + start

    def get(self, address: int, like: Array) -> Array:
        """What stands there now."""
        start = address - GLOBAL
        return self.bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def places(self, address: Array, size: int) -> Array:
        """(lanes, size) of bytes."""
        if (address % size).any():
            raise Wrong("an address is not a multiple of its size")
        place = (address - np.uint64(GLOBAL)).astype(np.int64)[:, None] + np.arange(size)
        if (place < 0).any() or (place >= self.end).any() or not self.there[place].all():
            raise Wrong("an address outside of all tensors")
        return place


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    left: int
    phase: int = 0
    bytes: int = 0

    def arrive(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise Wrong("more arrivals than a barrier counts")
        self.check()

    def check(self) -> None:
        if not self.left and not self.bytes:
            self.phase, self.left = self.phase + 1, self.count


@dataclass
class Code:
    """A kernel, ready to run."""

    work: list[Work]
    said: list[str]
    """Each instruction as text."""
    threads: int
    registers: int
    num_registers: int
    counts: dict[str, int] = field(default_factory=dict)
    """How often each kind of instruction ran, over all warps."""


class Block:
    """A program: its shared memory, barriers, copies and warps."""

    def __init__(
        self, code: Code, memory: Memory, given: list[Any], place: tuple[int, int], seed: int
    ) -> None:
        self.code, self.memory, self.given, self.place = code, memory, given, place
        self.draw = random.Random(seed)
        self.shared = np.full(SHARED_BYTES, 0xFF, np.uint8)
        self.dirty = np.zeros((-(-code.threads // 128), SHARED_BYTES // 16), np.uint64)
        """For each group of warps, of every 16 bytes: who stored there and has not fenced since."""
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list[int]] = {}
        """By number: threads that have come, threads that are waited for, and rounds."""
        self.copies: list[Callable[[], None]] = []
        self.warps = [Warp(self, n) for n in range(code.threads // LANES)]
        self.free = REGISTERS - code.threads * code.registers
        self.steps = 0

    def run(self, most: int = 100_000_000) -> None:
        running = list(self.warps)
        while running:
            ready = [warp for warp in running if warp.wait is None or warp.wait()]
            if self.copies and (not ready or self.draw.random() < 0.3):
                self.copies.pop(self.draw.randrange(len(self.copies)))()
                continue
            if not ready:
                where = {warp.number: self.code.said[warp.at - 1] for warp in running}
                own = [warp.own for warp in self.warps]
                raise Wrong(f"deadlock: everybody waits: {where}, registers {own}, {self.free}")
            warp = self.draw.choice(ready)
            warp.wait = None
            warp.run(self.draw.choice((20, 200, 5000)))
            if warp.ended:
                running.remove(warp)
            if self.steps > most:
                raise Wrong("the kernel does not end")
        if self.copies:
            raise Wrong("a copy is on its way when the program ends")

    def come(self, barrier: int, threads: int) -> Callable[[], bool]:
        """A warp at a named barrier; when it may go on."""
        state = self.named.setdefault(barrier, [0, threads, 0])
        if not state[0]:
            state[1] = threads
        if state[1] != threads:
            raise Wrong(f"barrier {barrier}: for {state[1]} threads, and for {threads}")
        state[0] += LANES
        before = state[2]
        if state[0] == threads:
            state[0], state[2] = 0, before + 1
        return lambda: state[2] != before

    def check_fenced(self, place: Array, group: int, what: str) -> None:
        if self.dirty[group, np.unique(place // 16)].any():
            raise Wrong(f"{what} memory that was stored to without a fence")

    def copy(self, of: TensorMap, at: list[int], into: int, barrier: int, group: int) -> None:
        """Starts the copy of a box; what is outside of the tensor reads as zeros."""
        size, lines = of.strides[0], tuple(reversed(of.box))
        count = size * int(np.prod(lines))
        if into % 128 or of.box[0] * size > (of.swizzle or 1 << 20):
            raise Wrong("a box that the copy engine does not take")
        place = swizzled(into + np.arange(count), of.swizzle)
        self.check_fenced(place, group, "a copy overwrites")
        self.shared[place] = 0xFF
        state = self.barriers.get(barrier)
        if state is None:
            raise Wrong("a copy tells a barrier that is none")

        def land() -> None:
            steps = reversed(np.meshgrid(*map(np.arange, lines), indexing="ij"))
            inside, address = np.ones(lines, bool), np.zeros(lines, np.int64)
            for step, first, length, stride in zip(steps, at, of.shape, of.strides, strict=True):
                inside &= (step + first >= 0) & (step + first < length)
                address += (step + first) * stride
            values = np.zeros((*lines, size), np.uint8)
            source = of.address - GLOBAL + address[inside][:, None] + np.arange(size)
            if not self.memory.there[source].all():
                raise Wrong("a copy reads outside of all tensors")
            values[inside] = self.memory.bytes[source]
            self.shared[place] = values.reshape(-1)
            state.bytes -= count
            state.check()

        self.copies.append(land)


def swizzled(place: Array, width: int) -> Array:
    """Where bytes of a tile are, if 16 of them change places within lines of `width`."""
    return place ^ (((place >> 7) & (max(width, 16) // 16 - 1)) << 4)


class Group(NamedTuple):
    """Products of a warp that are waited for together."""

    held: list[tuple[int, Array]]
    """Registers that they read, and what those hold."""
    read: list[tuple[Array, Array]]
    """Places of shared memory, and what stood there."""
    written: set[int]


class Warp:
    """32 threads that never part."""

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number, self.at = block, number, 0
        self.ended, self.wait, self.mask = False, None, None
        self.registers: list[Any] = [None] * block.code.num_registers
        self.fenced: list[Any] = list(self.registers)
        """Registers as they were at the last fence of products."""
        self.open = Group([], [], set())
        self.groups: list[Group] = []
        self.sums: dict[int, Array] = {}
        """What products under way will leave in registers; those themselves are None."""
        self.own = block.code.registers

    def run(self, most: int) -> None:
        work, block = self.block.code.work, self.block
        done = 0
        while done < most:
            done += 1
            try:
                found = work[self.at](self)
            except (AttributeError, TypeError, np.exceptions.AxisError) as error:
                said = block.code.said[self.at]
                if any(self.registers[n] is None for n in self.sums):
                    raise Wrong(f"a register is used under a product: {said}") from error
                raise Wrong(f"a register is used before it has a value: {said}") from error
            except Wrong as error:
                raise Wrong(f"{error}: warp {self.number}: {block.code.said[self.at]}") from error
            if found is None:
                self.at += 1
            elif type(found) is int:
                if found < 0:
                    self.ended = True
                    if self.groups or self.open.written:
                        raise Wrong("a warp ends while a product is under way")
                    break
                self.at = found
            else:
                self.at += 1
                if not found():
                    self.wait = found
                    break
        block.steps += done

    def finish(self, most: int) -> None:
        """Products of all but the last `most` groups write their registers."""
        while len(self.groups) > most:
            group = self.groups.pop(0)
            for number, values in group.held:
                if self.registers[number] is not values:
                    raise Wrong("a register changes under a product that reads it")
            for place, before in group.read:
                if not np.array_equal(self.block.shared[place], before):
                    raise Wrong("memory changes under a product")
            later = set().union(self.open.written, *(other.written for other in self.groups))
            for number in group.written - later:
                if self.registers[number] is not None:
                    raise Wrong("a register is written under a product that writes it")
                self.registers[number] = self.sums.pop(number)

    def operand_in_registers(self, numbers: list[int]) -> Array:
        """(16, 16) of a warp's rows: what lanes hold of them."""
        group, column = _LANE // 4, _LANE % 4 * 2
        made = np.empty((16, 16), np.uint16)
        for n, number in enumerate(numbers):
            # PTX may write it behind the fence of products, and ptxas then moves the fence:
            # `hopper_compiled` looks whether it did.
            values = self.registers[number]
            self.open.held.append((number, values))
            halves = values.view(np.uint16).reshape(LANES, 2)
            for side in range(2):
                made[group + n % 2 * 8, column + n // 2 * 8 + side] = halves[:, side]
        return made

    def operand_in_memory(self, descriptor: int, rows: Array, columns: int, along: bool) -> Array:
        """(rows, columns) of a matrix of 16-bit numbers; `along`: rows, not columns, side by side.

        The descriptor has the start, two distances and the swizzle.
        """
        start, lead, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        width = {0: 16, 1: 128, 2: 64, 3: 32}[descriptor >> 62]
        if descriptor >> 49 & 7:
            raise Wrong("a matrix with a base offset, which is not known here")
        row, column = rows[:, None], np.arange(columns)[None, :]
        if along:
            atom = width // 2
            place = row // atom * lead + column // 8 * stride + column % 8 * width + row % atom * 2
        elif width == 16:
            place = row // 8 * stride + row % 8 * 16 + column // 8 * lead + column % 8 * 2
        else:
            place = row // 8 * stride + row % 8 * width + column * 2
        place = swizzled(start + place[..., None] + np.arange(2), width)
        if width != 16 and start % width >= width:
            raise Wrong("a matrix does not begin in a line")
        block = self.block
        block.check_fenced(place, self.number // 4, "a product reads")
        found = block.shared[place]
        self.open.read.append((place, found))
        return np.ascontiguousarray(found).view(np.uint16)[..., 0]

    def multiply(self, sums: list[int], a: Array, b: Array, added: bool, half: bool) -> None:
        """Adds (16, K) times (N, K) turned round to what 16 rows of a group's have."""
        row, column = _LANE // 4, _LANE % 4 * 2
        product = floats(a, half) @ floats(b, half).T
        for n, number in enumerate(sums):
            part = product[row + n // 2 % 2 * 8, n // 4 * 8 + column + n % 2]
            if added and number in self.sums:
                part = part + self.sums[number].view(np.float32)
            elif added:
                if self.fenced[number] is not self.registers[number]:
                    raise Wrong("a product adds to a register that was written after its fence")
                part = part + self.registers[number].view(np.float32)
            self.sums[number] = part.astype(np.float32).view(np.uint32)
            self.registers[number] = None
        self.open.written.update(sums)


def floats(bits: Array, half: bool) -> Array:
    """float32 of float16 or of bfloat16."""
    if half:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16(x: Array) -> Array:
    """The bits of float32 rounded to bfloat16, ties to even."""
    bits = x.view(np.uint32)
    made = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), made)


class Line(NamedTuple):
    """An instruction: its predicate, name and operands."""

    predicate: str
    name: list[str]
    operands: list[str]
    text: str


class Reader:
    """Reads PTX, and makes each instruction a function of a warp."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.(loc|file|pragma)[^\n]*$", "", text, flags=re.M)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.S)
        assert entry is not None, "no kernel"
        names = re.findall(r"\.param[^,]*?([\w$]+)(?:\[\d+\])?\s*(?:,|$)", entry[2])
        self.parameters = {name: number for number, name in enumerate(names)}
        self.threads = int(re.search(r"\.reqntid (\d+)", entry[3])[1])  # type: ignore[index]
        most = re.search(r"\.maxnreg (\d+)", entry[3])
        self.most = int(most[1]) if most else 0
        self.numbers: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self.lines: list[tuple[Line, tuple[int, ...]]] = []
        self._read(text[entry.end() :])

    def _read(self, body: str) -> None:
        scopes: list[int] = [0]
        at, opened = 0, 0
        while True:
            while body[at].isspace() or body[at] == ";":
                at += 1
            if body[at] == "{":
                opened += 1
                scopes.append(opened)
                at += 1
            elif body[at] == "}":
                scopes.pop()
                at += 1
                if not scopes:
                    return
            elif label := re.compile(r"([\w$]+):").match(body, at):
                self.labels[self._named(label[1], scopes)] = len(self.lines)
                at = label.end()
            else:
                end = body.index(";", at)
                self._statement(" ".join(body[at:end].split()), scopes)
                at = end + 1

    def _named(self, name: str, scopes: list[int]) -> str:
        return name if name[0] in "%$" else f"{name}@{scopes[-1]}"

    def _statement(self, text: str, scopes: list[int]) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            size = {"pred": 0}.get(kind[1:], int(re.sub(r"\D", "", kind) or 0) // 8)
            for name in names.split(","):
                many = re.match(r"([%\w]+)<(\d+)>", name.strip())
                if many:
                    for n in range(int(many[2])):
                        self._register(f"{many[1]}{n}", size)
                else:
                    self._register(self._named(name.strip(), scopes), size)
            return
        if text.startswith(".branchtargets"):
            (name,) = [name for name, at in self.labels.items() if at == len(self.lines)][-1:]
            self.tables[name] = [part.strip() for part in text.split(None, 1)[1].split(",")]
            return
        predicate, rest = re.match(r"(@!?[%\w]+ )?(.*)", text).groups()  # type: ignore[union-attr]
        name, _, operands = rest.partition(" ")
        parts = [p.strip() for p in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", operands)]
        self.lines.append((Line(predicate or "", name.split("."), parts, text), tuple(scopes)))

    def _register(self, name: str, size: int) -> None:
        self.numbers[name] = len(self.numbers)
        self.sizes[name] = size

    def code(self) -> Code:
        """All of it."""
        work, said = [], []
        counts: dict[str, int] = {}
        for line, scopes in self.lines:
            self.scopes = scopes
            work.append(self._guarded(line, self._work(line)))
            said.append(line.text)
        return Code(work, said, self.threads, self.most, len(self.numbers), counts)

    def number(self, name: str) -> int:
        """Of a register; names of inline code belong to its braces."""
        if name in self.numbers:
            return self.numbers[name]
        return self.numbers[f"{name}@{self.scopes[-1]}"]

    def target(self, name: str) -> int:
        return self.labels[name if name in self.labels else f"{name}@{self.scopes[-1]}"]

    def _guarded(self, line: Line, work: Work) -> Work:
        if not line.predicate:
            return work
        negated = line.predicate[1] == "!"
        number = self.number(line.predicate.strip("@! "))
        masked = line.name[0] in (
            "ld", "st", "mbarrier", "cp", "bra", "atom", "red", "ret")  # fmt: skip
        written = [] if masked else self._numbers(line.operands[0])
        left = self._numbers(line.operands[0]) if line.name[0] == "ld" else written

        def guarded(warp: Warp) -> Any:
            mask = warp.registers[number] ^ negated
            if not mask.any():
                for n in left:  # the compiler may move what nobody has written
                    if warp.registers[n] is None and n not in warp.sums:
                        warp.registers[n] = np.zeros(LANES, f"u{self.sizes_of_number(n) or 1}")
                return None
            if mask.all():
                return work(warp)
            if masked:
                warp.mask = mask
                try:
                    return work(warp)
                finally:
                    warp.mask = None
            before = [warp.registers[n] for n in written]
            work(warp)
            for n, old in zip(written, before, strict=True):
                new = warp.registers[n]
                warp.registers[n] = np.where(mask, new, np.zeros_like(new) if old is None else old)
            return None

        return guarded

    def _numbers(self, operand: str) -> list[int]:
        """Of all registers of an operand such as {%r1, %r2}."""
        return [self.number(part.strip()) for part in operand.strip("{}").split(",")]

    def get(self, operand: str, kind: str) -> Callable[[list[Any]], Array]:
        """Reads an operand: a register or a constant."""
        operand = operand.strip()
        if kind == "pred":
            if operand.lstrip("-").isdigit():
                constant = np.full(LANES, bool(int(operand)))
                return lambda _: constant
            number = self.number(operand)
            return lambda registers: registers[number]
        size = int(kind.lstrip("bfusx")) // 8 if kind != "bf16" else 2
        dtype = np.dtype(f"{_KIND[kind[0]]}{size}") if kind != "bf16" else np.dtype("u2")
        plain = np.dtype(f"u{size}")
        if operand[0] == "%" or operand in self.numbers or f"{operand}@{self.scopes[-1]}" in (
            self.numbers
        ):  # fmt: skip
            if special := self._special(operand):
                return special
            number = self.number(operand)
            wide = self.sizes[next(n for n, i in self.numbers.items() if i == number)]
            if wide != size:  # the low part
                narrow = np.dtype(f"u{wide}")
                return lambda registers: registers[number].view(narrow).astype(plain).view(dtype)
            if dtype == plain:
                return lambda registers: registers[number]
            return lambda registers: registers[number].view(dtype)
        constant = np.full(LANES, self._constant(operand, size), plain).view(dtype)
        return lambda _: constant

    def _constant(self, operand: str, size: int) -> int:
        if operand[:2] in ("0f", "0d"):
            return int(operand[2:], 16)
        if operand == "global_smem":
            return 0
        if operand in self.parameters:
            return PARAMETERS + 4096 * self.parameters[operand]
        return int(operand.rstrip("U"), 0) & ((1 << 8 * size) - 1)

    def _special(self, name: str) -> Callable[[Any], Array] | None:
        return None if name.partition(".")[0] not in (
            "%tid", "%ctaid", "%nctaid", "%ntid", "%laneid") else lambda _: None  # fmt: skip

    def address(self, operand: str) -> Callable[[list[Any]], Array]:
        """Reads [%rd1 + 8]."""
        base, _, more = operand.strip("[] ").replace(" ", "").partition("+")
        kind = "b64" if base.startswith("%rd") or self._size_of(base) == 8 else "b32"
        read = self.get(base, kind)
        offset = int(more or 0)
        if not offset:
            return read
        added = np.full(LANES, offset & ((1 << int(kind[1:])) - 1), np.dtype(f"u{kind[1:]}"[0] + (
            "8" if kind == "b64" else "4")))  # fmt: skip
        return lambda registers: read(registers) + added

    def _size_of(self, name: str) -> int:
        found = name if name in self.sizes else f"{name}@{self.scopes[-1]}"
        return self.sizes.get(found, 4)

    def _work(self, line: Line) -> Work:
        made = getattr(self, f"_{line.name[0]}", None)
        if made is None:
            raise NotImplementedError(line.text)
        return made(line)

    # Numbers

    def _plain(self, line: Line, function: Any, kinds: list[str], out: str | None = None) -> Work:
        """A function of operands of such kinds."""
        target = self.number(line.operands[0])
        reads = [self.get(o, k) for o, k in zip(line.operands[1:], kinds, strict=True)]
        size = self.sizes_of_number(target) if out is None else 0
        plain = None if not size else np.dtype(f"u{size}")
        if len(reads) == 1:
            (a,) = reads
            call = lambda r: function(a(r))  # noqa: E731
        elif len(reads) == 2:
            a, b = reads
            call = lambda r: function(a(r), b(r))  # noqa: E731
        else:
            a, b, c = reads
            call = lambda r: function(a(r), b(r), c(r))  # noqa: E731

        def work(warp: Warp) -> None:
            registers = warp.registers
            found = call(registers)
            registers[target] = (
                found if plain is None or found.dtype == plain else found.view(plain)
            )

        return work

    def sizes_of_number(self, number: int) -> int:
        if not hasattr(self, "_by_number"):
            self._by_number = list(self.sizes.values())
        return self._by_number[number]

    def _two(self, line: Line, function: Any) -> Work:
        kind = line.name[-1]
        return self._plain(line, function, [kind, kind])

    def _add(self, line: Line) -> Work:
        return self._two(line, np.add)

    def _sub(self, line: Line) -> Work:
        return self._two(line, np.subtract)

    def _min(self, line: Line) -> Work:
        return self._two(line, np.fmin if line.name[-1][0] == "f" else np.minimum)

    def _max(self, line: Line) -> Work:
        return self._two(line, np.fmax if line.name[-1][0] == "f" else np.maximum)

    def _and(self, line: Line) -> Work:
        return self._two(line, np.bitwise_and)

    def _or(self, line: Line) -> Work:
        return self._two(line, np.bitwise_or)

    def _xor(self, line: Line) -> Work:
        return self._two(line, np.bitwise_xor)

    def _not(self, line: Line) -> Work:
        return self._plain(line, np.bitwise_not, [line.name[-1]])

    def _neg(self, line: Line) -> Work:
        return self._plain(line, np.negative, [line.name[-1]])

    def _abs(self, line: Line) -> Work:
        return self._plain(line, np.abs, [line.name[-1]])

    def _tanh(self, line: Line) -> Work:
        return self._plain(line, np.tanh, [line.name[-1]])

    def _ex2(self, line: Line) -> Work:
        return self._plain(line, np.exp2, [line.name[-1]])

    def _rcp(self, line: Line) -> Work:
        return self._plain(line, lambda x: np.float32(1) / x, [line.name[-1]])

    def _shl(self, line: Line) -> Work:
        kind, bits = line.name[-1], int(line.name[-1][1:])

        def shift(x: Array, by: Array) -> Array:
            return np.where(
                by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0)
            )

        return self._plain(line, shift, [kind, "u32"])

    def _shr(self, line: Line) -> Work:
        kind, bits = line.name[-1], int(line.name[-1][1:])

        def shift(x: Array, by: Array) -> Array:
            moved = x >> np.minimum(by, bits - 1).astype(x.dtype)
            return moved if kind[0] == "s" else np.where(by < bits, moved, x.dtype.type(0))

        return self._plain(line, shift, [kind, "u32"])

    def _bfe(self, line: Line) -> Work:
        kind = line.name[-1]
        assert kind in ("u32", "s32"), line.text

        def field(x: Array, first: Array, count: Array) -> Array:
            wide = count.astype(np.int64)
            found = (x.astype(np.int64) >> first.astype(np.int64)) & ((1 << wide) - 1)
            if kind == "s32":
                found -= (found >> np.maximum(wide - 1, 0) & 1) << wide
            return found.astype(np.uint32)

        return self._plain(line, field, ["u32", "u32", "u32"])

    def _bfind(self, line: Line) -> Work:
        def highest(x: Array) -> Array:
            wide = np.floor(np.log2(np.maximum(x, 1).astype(np.float64))).astype(np.uint32)
            return np.where(x == 0, np.uint32(0xFFFFFFFF), wide)

        return self._plain(line, highest, [line.name[-1]])

    def _wide(self, line: Line) -> tuple[str, str]:
        kind = line.name[-1]
        return kind, f"{kind[0]}{2 * int(kind[1:])}"

    def _mul(self, line: Line) -> Work:
        kind = line.name[-1]
        if "wide" in line.name:
            _, wide = self._wide(line)
            dtype = np.dtype(f"{_KIND[wide[0]]}{int(wide[1:]) // 8}")
            return self._plain(
                line, lambda a, b: a.astype(dtype) * b.astype(dtype), [kind, kind], "wide"
            )
        if "hi" in line.name:
            dtype = {"u": np.uint64, "s": np.int64}[kind[0]]
            assert kind[1:] == "32"
            return self._plain(
                line, lambda a, b: (a.astype(dtype) * b.astype(dtype) >> 32).astype(a.dtype),
                [kind, kind],
            )  # fmt: skip
        return self._two(line, np.multiply)

    def _mad(self, line: Line) -> Work:
        kind = line.name[-1]
        if "wide" in line.name:
            _, wide = self._wide(line)
            dtype = np.dtype(f"{_KIND[wide[0]]}{int(wide[1:]) // 8}")
            return self._plain(
                line, lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c, [kind, kind, wide]
            )
        return self._plain(line, lambda a, b, c: a * b + c, [kind] * 3)

    def _fma(self, line: Line) -> Work:
        kind = line.name[-1]

        def once(a: Array, b: Array, c: Array) -> Array:
            return (a.astype(np.float64) * b + c).astype(np.float32)

        assert kind == "f32", line.text
        return self._plain(line, once, [kind] * 3)

    def _div(self, line: Line) -> Work:
        kind = line.name[-1]
        if kind[0] == "f":
            return self._two(line, np.divide)

        def divide(a: Array, b: Array) -> Array:
            wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
            sign = np.sign(wide_a) * np.sign(wide_b)
            return (np.abs(wide_a) // np.abs(wide_b) * sign).astype(a.dtype)

        return self._two(line, divide)

    def _rem(self, line: Line) -> Work:
        def left(a: Array, b: Array) -> Array:
            return np.fmod(a.astype(np.int64), b.astype(np.int64)).astype(a.dtype)

        return self._two(line, left)

    def _selp(self, line: Line) -> Work:
        kind = line.name[-1]
        return self._plain(line, lambda a, b, p: np.where(p, a, b), [kind, kind, "pred"])

    def _setp(self, line: Line) -> Work:
        compare, kind = line.name[1], line.name[-1]
        unordered = kind[0] == "f" and compare.endswith("u") and compare != "u"
        function = _COMPARE[compare[:-1] if unordered else compare]
        if unordered:
            plain, function = function, lambda a, b: plain(a, b) | np.isnan(a) | np.isnan(b)
        if len(line.operands) == 4:
            joined = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
            join = joined[line.name[2]]
            return self._plain(
                line, lambda a, b, p: join(function(a, b), p), [kind, kind, "pred"], "pred"
            )
        return self._plain(line, function, [kind, kind], "pred")

    def _cvt(self, line: Line) -> Work:
        to, given = line.name[-2:]
        if to == "bf16x2":
            return self._plain(
                line,
                lambda a, b: bfloat16(a).astype(np.uint32) << 16 | bfloat16(b),
                ["f32", "f32"],
            )
        if to == "f16x2":

            def halves(a: Array, b: Array) -> Array:
                high, low = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (a, b))
                return high << 16 | low

            return self._plain(line, halves, ["f32", "f32"])  # fmt: skip
        if to == "bf16":
            return self._plain(line, bfloat16, ["f32"])
        if given == "bf16":
            return self._plain(line, lambda x: x.astype(np.uint32) << 16, ["u16"])
        dtype = np.dtype(f"{_KIND[to[0]]}{int(to[1:]) // 8}")
        rounded = np.rint if "rni" in line.name else np.trunc

        def convert(x: Array) -> Array:
            return (rounded(x) if x.dtype.kind == "f" and dtype.kind != "f" else x).astype(dtype)

        return self._plain(line, convert, [given])

    def _cvta(self, line: Line) -> Work:
        return self._plain(line, lambda x: x, ["u64"])

    def _mov(self, line: Line) -> Work:
        to, given = line.operands
        kind = line.name[-1]
        if to[0] == "{":
            numbers = [None if part.strip() == "_" else self.number(part.strip())
                       for part in to.strip("{}").split(",")]  # fmt: skip
            read, narrow = self.get(given, kind), np.dtype(f"u{int(kind[1:]) // 8 // len(numbers)}")

            def apart(warp: Warp) -> None:
                parts = read(warp.registers).view(narrow).reshape(LANES, -1)
                for n, number in enumerate(numbers):
                    if number is not None:
                        warp.registers[number] = parts[:, n].copy()

            return apart
        if given[0] == "{":
            inside = given.strip("{}").split(",")
            size = int(kind[1:]) // len(inside)
            reads = [self.get(part, f"b{size}") for part in inside]
            target, wide = self.number(to), np.dtype(f"u{int(kind[1:]) // 8}")

            def together(warp: Warp) -> None:
                parts = [read(warp.registers) for read in reads]
                warp.registers[target] = np.stack(parts, 1).view(wide)[:, 0]

            return together
        if given.partition(".")[0] in ("%tid", "%ctaid", "%nctaid", "%ntid", "%laneid"):
            return self._place(given, self.number(to))
        return self._plain(line, _same, [kind], "pred" if kind == "pred" else None)

    def _place(self, name: str, target: int) -> Work:
        def work(warp: Warp) -> None:
            first, count = warp.block.place
            found = {
                "%tid.x": _LANE + np.uint32(warp.number * LANES),
                "%laneid": _LANE,
                "%ctaid.x": np.full(LANES, first, np.uint32),
                "%nctaid.x": np.full(LANES, count, np.uint32),
                "%ntid.x": np.full(LANES, warp.block.code.threads, np.uint32),
            }
            warp.registers[target] = found.get(name, np.zeros(LANES, np.uint32))

        return work

    # Lanes

    def _shfl(self, line: Line) -> Work:
        how = line.name[2]
        target = self.number(line.operands[0].partition("|")[0])
        value, by = self.get(line.operands[1], "b32"), self.get(line.operands[2], "u32")

        def work(warp: Warp) -> None:
            step = by(warp.registers)
            source = {"idx": step, "bfly": _LANE ^ step, "down": _LANE + step, "up": _LANE - step}
            place = source[how]
            place = np.where(place < LANES, place, _LANE)
            warp.registers[target] = value(warp.registers)[place]

        return work

    def _elect(self, line: Line) -> Work:
        leader, chosen = (self.number(part.strip()) for part in line.operands[0].split("|"))

        def work(warp: Warp) -> None:
            warp.registers[leader] = np.zeros(LANES, np.uint32)
            warp.registers[chosen] = _LANE == 0

        return work

    # Ways

    def _bra(self, line: Line) -> Work:
        target = self.target(line.operands[0])

        def work(warp: Warp) -> int:
            if warp.mask is not None:
                raise Wrong("lanes of a warp go different ways")
            return target

        return work

    def _brx(self, line: Line) -> Work:
        read = self.get(line.operands[0], "u32")
        targets = [self.target(name) for name in self.tables[line.operands[1]]]

        def work(warp: Warp) -> int:
            way = read(warp.registers)
            if (way != way[0]).any():
                raise Wrong("lanes of a warp go different ways")
            return targets[int(way[0])]

        return work

    def _ret(self, _: Line) -> Work:
        return lambda _: -1

    def _bar(self, line: Line) -> Work:
        if line.name[1] == "warp":
            return lambda _: None
        number = int(line.operands[0])
        threads = int(line.operands[1]) if len(line.operands) > 1 else self.threads
        return lambda warp: warp.block.come(number, threads)

    _barrier = _bar

    def _fence(self, line: Line) -> Work:
        if line.name[1] != "proxy":
            return lambda _: None

        def work(warp: Warp) -> None:
            warp.block.dirty &= np.uint64(~(1 << warp.number) & (1 << 64) - 1)

        return work

    def _setmaxnreg(self, line: Line) -> Work:
        wanted, more = int(line.operands[0]), line.name[1] == "inc"

        def work(warp: Warp) -> Any:
            block, needed = warp.block, (wanted - warp.own) * LANES
            if more != (needed >= 0) and needed:
                raise Wrong("setmaxnreg goes the other way")
            if needed <= block.free:
                block.free -= needed
                warp.own = wanted
                return None

            def ready() -> bool:
                if warp.own != wanted and needed <= block.free:
                    block.free -= needed
                    warp.own = wanted
                return warp.own == wanted

            return ready

        return work

    # Memory

    def _moved(self, line: Line) -> tuple[str, list[str], str]:
        """Space, registers and kind of a load or a store."""
        values, at = line.operands if line.name[0] == "ld" else reversed(line.operands)
        return line.name[1].partition("::")[0], values.strip("{} ").split(","), at

    def _ld(self, line: Line) -> Work:
        space, values, at = self._moved(line)
        kind = line.name[-1]
        targets = [self.number(value.strip()) for value in values]
        size = int(kind[1:]) // 8
        if space == "param":
            return self._parameter(at, targets[0], size)
        read, plain, whole = self.address(at), np.dtype(f"u{size}"), size * len(targets)
        kept = [np.dtype(f"u{self.sizes_of_number(n)}") for n in targets]

        def work(warp: Warp) -> None:
            address, registers = read(warp.registers), warp.registers
            mask = warp.mask
            if mask is not None:
                address = address[mask]
            found = _bytes_at(warp, space, address, whole)
            lines = np.ascontiguousarray(found).view(plain)
            for n, target in enumerate(targets):
                part = lines[:, n].astype(kept[n])
                if mask is not None:
                    old = registers[target]
                    full = np.zeros(LANES, kept[n]) if old is None else old.copy()
                    full[mask] = part
                    part = full
                registers[target] = part

        return work

    def _parameter(self, at: str, target: int, size: int) -> Work:
        number, dtype = self.parameters[at.strip("[] ")], np.dtype(f"u{size}")

        def work(warp: Warp) -> None:
            given = warp.block.given[number]
            if isinstance(given, float):
                given = int(np.float32(given).view(np.uint32))
            warp.registers[target] = np.full(LANES, given & ((1 << 8 * size) - 1), dtype)

        return work

    def _st(self, line: Line) -> Work:
        space, values, at = self._moved(line)
        kind = line.name[-1]
        size = int(kind[1:]) // 8
        reads = [self.get(value, f"b{8 * size}") for value in values]
        read, whole = self.address(at), size * len(values)

        def work(warp: Warp) -> None:
            registers = warp.registers
            lines = np.stack([value(registers) for value in reads], 1)
            lines = np.ascontiguousarray(lines).view(np.uint8)
            address = read(registers)
            if warp.mask is not None:
                lines, address = lines[warp.mask], address[warp.mask]
            if space == "global":
                warp.block.memory.bytes[warp.block.memory.places(address, whole)] = lines
            else:
                _store_shared(warp, address, lines)

        return work

    def _stmatrix(self, line: Line) -> Work:
        read = self.address(line.operands[0])
        values = [self.number(part.strip()) for part in line.operands[1].strip("{}").split(",")]
        assert "trans" not in line.name
        assert len(values) == 4, line.text

        def work(warp: Warp) -> None:
            address = read(warp.registers).astype(np.int64)
            for n, number in enumerate(values):
                rows = address[8 * n + _LANE // 4] + _LANE % 4 * 4
                lines = warp.registers[number][:, None].view(np.uint8)
                _store_shared(warp, rows, lines)

        return work

    def _ldmatrix(self, line: Line) -> Work:
        read = self.address(line.operands[1])
        targets = self._numbers(line.operands[0])
        assert "trans" not in line.name
        assert len(targets) == 4, line.text

        def work(warp: Warp) -> None:
            address = read(warp.registers).astype(np.int64)
            for n, target in enumerate(targets):
                place = address[8 * n + _LANE // 4] + _LANE % 4 * 4
                found = _bytes_at(warp, "shared", place, 4)
                warp.registers[target] = np.ascontiguousarray(found).view(np.uint32)[:, 0]

        return work

    def _mbarrier(self, line: Line) -> Work:
        what = line.name[1]
        at = line.operands[-2 if what in ("init", "try_wait") or "expect_tx" in line.name else -1]
        read = self.address(at)
        if what == "try_wait":
            target = self.number(line.operands[0])
            parity = self.get(line.operands[2], "u32")

            def wait(warp: Warp) -> Callable[[], bool]:
                address, phase = (int(x(warp.registers)[0]) for x in (read, parity))
                state = warp.block.barriers.get(address)
                if state is None or phase not in (0, 1):
                    raise Wrong("a wait for a barrier that is none")
                warp.registers[target] = np.ones(LANES, bool)
                return lambda: state.phase & 1 != phase

            return wait
        number = int(line.operands[-1]) if "expect_tx" in line.name or what == "init" else 0

        def work(warp: Warp) -> None:
            lanes = np.flatnonzero(np.ones(LANES, bool) if warp.mask is None else warp.mask)
            block = warp.block
            for lane in lanes:
                address = int(read(warp.registers)[lane])
                if what == "init":
                    block.barriers[address] = Barrier(number, number)
                    continue
                state = block.barriers.get(address)
                if state is None:
                    raise Wrong("an arrival at a barrier that is none")
                if "expect_tx" in line.name:
                    state.bytes += number
                state.arrive(1)

        return work

    def _cp(self, line: Line) -> Work:
        assert line.name[1:4] == ["async", "bulk", "tensor"], line.text
        into, source, barrier = (operand.strip("[] ") for operand in line.operands)
        of, _, at = source.partition(",")
        reads = [self.get(part, "s32") for part in at.strip(" {}").split(",")]
        map_at, place, tell = self.get(of, "u64"), self.address(into), self.address(barrier)

        def work(warp: Warp) -> None:
            block, registers = warp.block, warp.registers
            lanes = np.flatnonzero(np.ones(LANES, bool) if warp.mask is None else warp.mask)
            for lane in lanes:
                number, rest = divmod(int(map_at(registers)[lane]) - PARAMETERS, 4096)
                given = block.given[number]
                if rest or not isinstance(given, TensorMap):
                    raise Wrong("a tensor map that is none")
                start = [int(read(registers)[lane]) for read in reads]
                into, barrier = (int(at(registers)[lane]) for at in (place, tell))
                block.copy(given, start, into, barrier, warp.number // 4)

        return work

    # Products of warp groups

    def _wgmma(self, line: Line) -> Work:
        what = line.name[1]
        if what == "fence":

            def fence(warp: Warp) -> None:
                warp.fenced = list(warp.registers)

            return fence  # fmt: skip
        if what == "commit_group":

            def commit(warp: Warp) -> None:
                warp.groups.append(warp.open)
                warp.open = Group([], [], set())

            return commit  # fmt: skip
        if what == "wait_group":
            number = int(line.operands[0])
            return lambda warp: warp.finish(number)
        return self._product(line)

    def _product(self, line: Line) -> Work:
        shape = re.match(r"m64n(\d+)k16", line.name[4])
        assert shape is not None, line.text
        columns, half = int(shape[1]), line.name[-1] == "f16"
        sums = self._numbers(line.operands[0])
        assert len(sums) == columns // 2
        held = self._numbers(line.operands[1]) if line.operands[1][0] == "{" else None
        a = None if held else self.get(line.operands[1], "u64")
        b, added = self.get(line.operands[2], "u64"), self.get(line.operands[3], "pred")
        assert line.operands[4:6] == ["1", "1"]
        turned = [bool(int(word)) for word in line.operands[6:]]
        along_b, along_a = turned[-1], len(turned) > 1 and turned[0]

        def work(warp: Warp) -> None:
            registers = warp.registers
            if held:
                left = warp.operand_in_registers(held)
            else:
                assert a is not None
                rows = np.arange(16) + warp.number % 4 * 16
                left = warp.operand_in_memory(int(a(registers)[0]), rows, 16, along_a)
            right = warp.operand_in_memory(int(b(registers)[0]), np.arange(columns), 16, along_b)
            warp.multiply(sums, left, right, bool(added(registers)[0]), half)

        return work


def _same(x: Array) -> Array:
    if x is None:
        raise TypeError
    return x


def _bytes_at(warp: Warp, space: str, address: Array, size: int) -> Array:
    """(lanes, size)"""
    if space == "global":
        memory = warp.block.memory
        return memory.bytes[memory.places(address, size)]
    place = address.astype(np.int64)[:, None] + np.arange(size)
    if (address % size).any() or (place >= SHARED_BYTES).any():
        raise Wrong("an address that is not in shared memory")
    return warp.block.shared[place]


def _store_shared(warp: Warp, address: Array, lines: Array) -> None:
    size = lines.shape[1]
    place = address.astype(np.int64)[:, None] + np.arange(size)
    if (address % size).any() or (place >= SHARED_BYTES).any():
        raise Wrong("an address that is not in shared memory")
    block = warp.block
    # Storing what stands there already disturbs nobody, and the own group's fence is enough to show
    # it to the own group: both groups write the same zeros.
    changed = (block.shared[place] != lines).any(1)
    block.shared[place] = lines
    own, bit = block.dirty[warp.number // 4], np.uint64(1 << warp.number)
    same = place[~changed, 0] // 16
    own[same] = np.where(own[same], bit, own[same])
    block.dirty[:, place[changed, 0] // 16] |= bit


def run(text: str, memory: Memory, given: list[Any], programs: int, seed: int = 0) -> Iterator[int]:
    """Runs a kernel's programs one after the other; the number of instructions of each."""
    reader = Reader(text)
    code = reader.code()
    with np.errstate(all="ignore"):
        for number in range(programs):
            block = Block(code, memory, given, (number, programs), seed + number)
            block.run()
            yield block.steps
