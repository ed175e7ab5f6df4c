"""Compiled programs, read from their texts."""

from __future__ import annotations

from jaxspec.lab.cost.programs import Hlo, Launches, count_launches, loop_numbers, read_thunks

HLO = """HloModule jit_run, is_scheduled=true

%fused (p: u16[8,2,128,16]) -> u16[8,2,128,16] {
  %p = u16[8,2,128,16]{3,2,1,0} parameter(0)
  ROOT %copy.1 = u16[8,2,128,16]{3,1,2,0} copy(%p)
}

%inner_body (x: (s32[])) -> (s32[]) {
  %x = (s32[]) parameter(0)
  ROOT %t = (s32[]) tuple(%x)
}

%branch (x: (s32[])) -> (s32[]) {
  %y = (s32[]) parameter(0)
  ROOT %while.3 = (s32[], /*index=1*/f32[2]{0}) while(%y), condition=%c, body=%inner_body
}

%body (x: (s32[])) -> (s32[]) {
  %z = (s32[]) parameter(0)
  %while.2 = (s32[]) while(%z), body=%inner_body, backend_config={"known_trip_count":{"n":"3"}}
  %moved = f32[4]{0:S(5)} copy(%w)
  ROOT %cond.1 = (s32[]) conditional(%b, %z, %z), branch_computations={%inner_body, %branch}
}

ENTRY %main (a: s32[]) -> (s32[]) {
  %a = s32[] parameter(0)
  %kv = u16[8,2,128,16]{3,2,1,0:T(8,128)(2,1)} fusion(%a), kind=kLoop, calls=%fused
  ROOT %while.1 = (s32[]) while(%a), condition=%c, body=%body
}
"""

THUNKS = """001: kCopy         [source       | next=002 (1)] kCopy
002: kWhile        [prev=001 (1) | sink         ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion
  body:
    000: kCommandBuffer [source | next=020 (1)]
        005: kCopy         [source | sink] kCopy
        006: kConditional  [source | sink]
          false_branch:
            No thunks.          true_branch:
            007: kCustomKernel [source | sink] one
            008: kCustomKernel [source | sink] two
    020: kWhile         [prev=000 (1) | next=000 (1)]
condition:
        021: kCustomKernel [source | sink] wrapped_compare
      body:
        000: kCommandBuffer [source | sink]
            022: kCustomKernel [source | sink] step
            023: kCustomKernel [source | sink] step
    030: kConditional   [prev=020 (1) | sink]
      false_branch:
        031: kCustomKernel [source | sink] short
      true_branch:
        000: kCommandBuffer [source | sink]
            032: kCustomKernel [source | sink] long
            033: kCustomKernel [source | sink] long
"""


def test_loops_moves_and_memory_of_hlo():
    hlo = Hlo(HLO)
    assert hlo.entry == "main"
    found = [(loop.name, loop.depth, loop.trip_count) for loop in hlo.loops()]
    assert found == [("while.1", 1, None), ("while.2", 2, 3), ("while.3", 2, None)]
    assert hlo.moves_of(["u16[8,2,128,16]"]) == ["copy.1: copy"]
    assert hlo.moves_of(["u16[8,2,128,1]"]) == []
    assert hlo.num_host_buffers() == 1


def test_thunks_are_nested_by_indentation():
    copy, rounds = read_thunks(THUNKS)
    assert (copy.kind, rounds.number) == ("kCopy", 2)
    assert [thunk.number for thunk in rounds.inner_of("condition")] == [3]
    assert [thunk.number for thunk in rounds.inner_of("body")] == [0, 20, 30]
    graph, _, last = rounds.inner_of("body")
    assert [thunk.kind for thunk in graph.inner] == ["kCopy", "kConditional"]
    assert len(graph.inner[1].inner_of("true_branch")) == 2
    assert [len(last.inner_of(f"{branch}_branch")) for branch in ("false", "true")] == [1, 1]


def launches(trip_counts, takes_longest):
    [_, rounds] = read_thunks(THUNKS)
    return count_launches(
        rounds.inner_of("body"), trip_counts, num_trips=5, takes_longest=takes_longest
    )


def test_a_loop_of_known_length_reads_no_predicate():
    assert launches({20: 3}, True) == Launches(
        num_graphs=1 + 3 + 1, num_nodes=3 + 3 * 2 + 2, num_kernels=0, num_predicates=1
    )
    assert launches({20: 3}, False) == Launches(
        num_graphs=1 + 3, num_nodes=1 + 3 * 2, num_kernels=1, num_predicates=1
    )


def test_a_loop_of_unknown_length_reads_one_before_every_trip():
    assert launches({20: None}, True) == Launches(
        num_graphs=1 + 5 + 1, num_nodes=3 + 5 * 2 + 2, num_kernels=6, num_predicates=6 + 1
    )


def test_names_of_loops():
    metadata = """thunk_metadata {
  thunk_info {
    profile_annotation: "while.45"
    thunk_id: 20
  }
  thunk_kind: "kWhile"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "copy.1"
    thunk_id: 21
  }
  thunk_kind: "kCopy"
}
"""
    assert loop_numbers(metadata) == {20: "while.45"}
