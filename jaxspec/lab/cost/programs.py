"""What XLA compiled a program to, read from its own dumps: loops, copies of the KV, launches.

Two texts are read. The optimised HLO (`compiled.as_text()`) says which loops have a trip count that
the compiler knows, and what is copied. XLA's list of *thunks*, a debug dump of its GPU backend,
says what the host does: launch a kernel, launch a CUDA graph of many kernels, or copy a predicate
from the device, wait for it, and go on with a loop or with a branch. The dump has no stable format;
it is read as written by the JAX versions that the tests run with.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

# Of a layer of a model in a round with a short context, by the name of the kernels: counted on GPUs
# by `bench.program.launches_per_layer`, `xla` with one block of KV; `native` is calls of the C++
# kernels.
LAUNCHES_PER_LAYER: Mapping[str, int] = {"native": 5, "mosaic": 12, "pallas": 13, "xla": 35}

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_MOVES = ("copy", "copy-start", "transpose", "convert")
_HOST_MEMORY = "S(5)"  # the memory space in a layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """A line of HLO.

    Attributes:
      name: of the result.
      shape: of the result with its layout, `u16[32,2,128,128]{3,2,1,0}`.
      opcode: `fusion`, `while`, ...
      rest: operands and attributes.
    """

    name: str
    shape: str
    opcode: str
    rest: str

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found and found.group(1)

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional's branches."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        if found:
            return [name.strip().lstrip("%") for name in found.group(1).split(",")]
        named = (self.attribute("true_computation"), self.attribute("false_computation"))
        return [name for name in named if name is not None]

    @property
    def trip_count(self) -> int | None:
        """How often a loop's body runs, where the compiler knows."""
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(found.group(1)) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop.

    Attributes:
      name: of its instruction.
      depth: 1 for one that stands in no other.
      trip_count: None where the compiler does not know it.
    """

    name: str
    depth: int
    trip_count: int | None


class Hlo:
    """The optimised HLO of a program.

    Args:
      text: `compiled.as_text()`.

    Attributes:
      computations: lists of instructions by name.
      entry: the name of the first to run.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            begins = _COMPUTATION.match(line)
            if begins:
                current = self.computations.setdefault(begins.group(2), [])
                self.entry = begins.group(2) if begins.group(1) else self.entry
                continue
            found = _INSTRUCTION.match(line)
            if found:
                name, shape, opcode, rest = found.groups()
                current.append(Instruction(name=name, shape=shape, opcode=opcode, rest=rest))

    def instructions(self, *, with_entry: bool = True) -> Iterator[Instruction]:
        """Those of all computations, inside of fusions too; without the entry's, which run once."""
        for name, instructions in self.computations.items():
            if with_entry or name != self.entry:
                yield from instructions

    def loops(self) -> list[Loop]:
        """All loops, also those in branches, each before the loops in it."""
        return list(self._loops(self.entry, depth=1))

    def _loops(self, computation: str, depth: int) -> Iterator[Loop]:
        for each in self.computations[computation]:
            if each.opcode == "while":
                yield Loop(name=each.name, depth=depth, trip_count=each.trip_count)
                yield from self._loops(each.attribute("body") or "", depth + 1)
            elif each.opcode == "conditional":
                for branch in each.branches:
                    yield from self._loops(branch, depth)
            elif each.opcode == "call":
                yield from self._loops(each.attribute("to_apply") or "", depth)

    def moves_of(self, shapes: Iterable[str], *, with_entry: bool = False) -> list[str]:
        """Copies, transpositions and conversions in loops, or anywhere, whose result has one of
        these shapes, such as `u16[32,2,128,128]`: `name: opcode`."""
        return [
            f"{each.name}: {each.opcode}"
            for each in self.instructions(with_entry=with_entry)
            if each.opcode in _MOVES and any(shape in each.shape for shape in shapes)
        ]

    def num_host_buffers(self) -> int:
        """Instructions whose result lies in the host's memory."""
        return sum(_HOST_MEMORY in each.shape for each in self.instructions())


@dataclasses.dataclass(kw_only=True)
class Thunk:
    """A step of a GPU program as the host runs it.

    Attributes:
      number: XLA's.
      kind: `kCustomKernel`, `kCommandBuffer` (a CUDA graph), `kWhile`, `kConditional`, ...
      part: of the thunk that it stands in: `condition` or `body` of a loop, a branch of a
        conditional, or nothing.
      inner: the thunks in it.
    """

    number: int
    kind: str
    part: str
    inner: list[Thunk] = dataclasses.field(default_factory=list)

    def inner_of(self, part: str) -> list[Thunk]:
        """The thunks of one part."""
        return [thunk for thunk in self.inner if thunk.part == part]


_THUNK = re.compile(r"(\s*)(\d+): (k\w+)")
_PART = re.compile(r"(condition|body|\w*branch\w*)\s*:\s*$")
_NO_THUNKS = "No thunks."


def read_thunks(text: str) -> list[Thunk]:
    """The thunks of XLA's dump `*thunk_sequence_after_thunk_passes.txt`, nested by indentation."""
    root = Thunk(number=-1, kind="", part="")
    open_thunks: list[tuple[int, Thunk]] = [(-1, root)]
    parts: dict[int, str] = {}  # by the identity of the thunk: the part that was begun last
    begun: str | None = None
    for line in text.splitlines():
        found = _THUNK.match(line)
        if not found:
            part = _PART.search(line)
            if part:
                begun = part.group(1)
            elif _NO_THUNKS in line:
                begun = None
            continue
        indent = len(found.group(1))
        while open_thunks[-1][0] >= indent:
            open_thunks.pop()
        parent = open_thunks[-1][1]
        if begun is not None:
            parts[id(parent)], begun = begun, None
        thunk = Thunk(
            number=int(found.group(2)), kind=found.group(3), part=parts.get(id(parent), "")
        )
        parent.inner.append(thunk)
        open_thunks.append((indent, thunk))
    return root.inner


def loop_numbers(metadata: str) -> dict[int, str]:
    """Names of loops in the HLO by the number of their thunk, from the dump
    `*thunk_metadata.txt`."""
    entry = re.compile(
        r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)\s*\}\s*thunk_kind: "kWhile"'
    )
    return {int(number): name for name, number in entry.findall(metadata)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launches:
    """What the host does for a piece of a program.

    Attributes:
      num_graphs: CUDA graphs that it launches.
      num_nodes: kernels and copies in these graphs.
      num_kernels: kernels and copies that it launches one by one.
      num_predicates: predicates that it copies from the device and waits for.
    """

    num_graphs: int = 0
    num_nodes: int = 0
    num_kernels: int = 0
    num_predicates: int = 0

    def __add__(self, other: Launches) -> Launches:
        return Launches(**(_counts(self) + _counts(other)))

    def __mul__(self, times: int) -> Launches:
        return Launches(**{name: times * count for name, count in _counts(self).items()})

    @property
    def num_launched(self) -> int:
        """Kernels and copies, in graphs or not."""
        return self.num_nodes + self.num_kernels


def _counts(launches: Launches) -> collections.Counter[str]:
    return collections.Counter(dataclasses.asdict(launches))


TripCounts: TypeAlias = Mapping[int, int | None]  # by the number of the loop's thunk


def count_launches(
    thunks: Sequence[Thunk], trip_counts: TripCounts, *, num_trips: int, takes_longest: bool
) -> Launches:
    """What the host does for these thunks.

    Args:
      thunks: run one after the other.
      trip_counts: of loops, where the compiler knows them.
      num_trips: of loops where it does not; the host reads a predicate before each, and one more.
      takes_longest: whether conditionals take the branch of most launches, or that of the fewest.
    """

    def count(inner: Sequence[Thunk]) -> Launches:
        return sum(map(count_one, inner), Launches())

    def count_one(thunk: Thunk) -> Launches:
        if thunk.kind == "kSequential":
            return count(thunk.inner)
        if thunk.kind == "kCommandBuffer":
            return Launches(num_graphs=1, num_nodes=count(thunk.inner).num_launched)
        if thunk.kind == "kWhile":
            known = trip_counts.get(thunk.number)
            body = count(thunk.inner_of("body"))
            if known is not None:
                return body * known
            condition = count(thunk.inner_of("condition")) + Launches(num_predicates=1)
            return body * num_trips + condition * (num_trips + 1)
        if thunk.kind == "kConditional":
            branches = [count(thunk.inner_of(part)) for part in {t.part for t in thunk.inner}]
            if len(branches) < 2:  # a branch without thunks is not listed
                branches.append(Launches())
            choose = max if takes_longest else min
            chosen = choose(branches, key=lambda branch: branch.num_launched)
            return chosen + Launches(num_predicates=1)
        return Launches(num_kernels=1)

    return count(thunks)
