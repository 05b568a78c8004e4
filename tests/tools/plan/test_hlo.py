"""What is read from the text of compiled programs, for instructions as XLA writes them for CPUs, GPUs and TPUs."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lockstep.tools.plan.hlo import Collective, collectives, memory_traffic
from tests.support.hlo import donated, host_instructions

STARTED = "(f32[8,16]{1,0}, f32[64,16]{1,0})"
GROUP = "((f32[4]{0}, bf16[2,2]{1,0}), (f32[32]{0}, bf16[16,2]{1,0}))"


@pytest.mark.parametrize(
    ("line", "name", "size"),
    [
        ("  %all-reduce.1 = f32[10,4]{1,0} all-reduce(%x), channel_id=1", "all-reduce", 160),
        ("  ROOT %r = (f32[10]{0}, s32[]) all-reduce-start(%x, %y), channel_id=1", "all-reduce", 44),
        (f"  %g = {STARTED} all-gather-start(%x), channel_id=2", "all-gather", 4096),
        (f"  %g = {GROUP} all-gather-start(%x, %y), channel_id=2", "all-gather", 192),
        (
            "  %s = ((f32[64]{0}), f32[8]{0:T(256)}) reduce-scatter-start(%x), channel_id=2",
            "reduce-scatter",
            32,
        ),
        (
            "  %p = (f32[42,256]{1,0:T(8,128)S(1)}, f32[42,256]{1,0}, u32[]{:S(2)}, u32[]) collective-permute-start(%x)",
            "collective-permute",
            43_008,
        ),
    ],
)
def test_bytes_of_a_collective_are_those_of_its_result(line, name, size):
    assert collectives(line) == [Collective(name, size)]


def test_done_instructions_and_other_operations_are_no_collectives():
    assert not collectives("  %d = f32[4]{0} all-gather-done(%g)\n  %f = f32[4]{0} fusion(%all-reduce.1), calls=%c\n")


def test_parts_of_an_overlapped_collective_are_one_and_a_fused_reduce_scatter_is_one():
    gather = '  %g = f32[8,4]{1,0:T(8,128)} all-gather(%x), channel_id=7, frontend_attributes={chain_id="0"}'
    text = f"""%fused_computation.5 (x: f32[1,4]) -> (f32[8,4], u32[]) {{
{gather}
}}
%async_collective_fusion.1 (x: f32[1,4], y: f32[8,4]) -> f32[8,4] {{
{gather}
}}
%all-reduce-scatter (input: f32[784,256]) -> f32[104,256] {{
  %all-reduce.6 = f32[832,256]{{1,0:T(8,128)}} all-reduce(%pad), channel_id=8
}}
ENTRY %main (x: f32[1,4]) -> f32[8,4] {{
{gather.replace('chain_id="0"', "")}
}}
"""
    gathered = Collective("all-gather", 128)
    assert collectives(text) == [gathered, Collective("reduce-scatter", 106_496), gathered]


def test_collectives_in_loops_count_as_often_as_they_run():
    text = """%add (a: f32[], b: f32[]) -> f32[] {
}
%inner (x: f32[4]) -> f32[4] {
  %all-gather.1 = f32[8]{0} all-gather(%x), channel_id=2
}
%body (x: f32[4]) -> f32[4] {
  %all-reduce.1 = f32[4]{0} all-reduce(%x), channel_id=1, to_apply=%add
  %w.1 = f32[4]{0} while(%x), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %all-reduce.2 = f32[4]{0} all-reduce(%x), channel_id=3, to_apply=%add
  %w.2 = f32[4]{0} while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"200"}}
}
"""
    assert [(one.name, one.rounds) for one in collectives(text)] == [
        ("all-gather", 600),
        ("all-reduce", 200),
        ("all-reduce", 1),
    ]


def test_collectives_of_one_size_and_channel_are_several():
    lines = [f"  %r.{number} = f32[4]{{0}} all-reduce(%x), channel_id=1" for number in range(2)]
    text = "\n".join(["ENTRY %main (x: f32[4]) -> f32[4] {", *lines, "}"])
    assert collectives(text) == [Collective("all-reduce", 16)] * 2


def test_donated_arguments_are_counted():
    aliases = "{ {0}: (7, {}, may-alias), {1}: (20, {}, must-alias), {2, 1}: (0, {}, may-alias) }"
    assert donated(f"HloModule jit_step, is_scheduled=true, input_output_alias={aliases}, entry={{f32[]}}") == 3
    assert donated("HloModule jit_step, is_scheduled=true") == 0


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  %o = token[] outfeed(%x, %t)", ["outfeed"]),
        ('  %c = f32[] custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"', ["xla_ffi_python_gpu_callback"]),
        ("  %h = f32[4]{0:T(256)S(5)} copy(%x)", ["S(5)"]),
        ('  %c = f32[] custom-call(%x), custom_call_target="__cublas$gemm"', []),
    ],
)  # fmt: skip
def test_exchanges_with_the_host_are_found(line, found):
    assert host_instructions(line) == found


KIB = "f32[256]{0}"  # bytes of an array: 1,024
LOOP = """%body (x: f32[256]) -> f32[256] {{
  ROOT %a = {kib} fusion(%x), kind=kLoop, calls=%inner
}}
%inner (x: f32[256]) -> f32[256] {{
  ROOT %b = {kib} multiply(%x, %x)
}}
%one (x: f32[256]) -> f32[256] {{
  ROOT %c = {kib} negate(%x)
}}
ENTRY %main (x: f32[256]) -> f32[256] {{
  {line}
}}
"""


@pytest.mark.parametrize(
    ("line", "written"),
    [
        (f"%a = {KIB} fusion(%x), kind=kLoop, calls=%inner", 1),
        (f"%a = ({KIB}, {KIB}) custom-call(%x)", 2),
        (f"%a = {KIB} bitcast(%x)", 0),
        ("%a = f32[256]{0:T(256)S(1)} fusion(%x), calls=%inner", 0),
        (f"%a = ({KIB}, {KIB}) all-gather-start(%x)", 0),
        (f"%a = {KIB} all-gather-done(%x)", 1),
        (f"%a = {KIB} call(%x), to_apply=%body", 1),
        (f"%a = {KIB} while(%x), condition=%one, body=%body", 1),
        (
            f'%a = {KIB} while(%x), condition=%one, body=%body, backend_config={{"known_trip_count":{{"n":"24"}}}}',
            24,
        ),
        (f"%a = {KIB} conditional(%x, %x), branch_computations={{%one, %body}}", 1),
        (f"%a = {KIB} conditional(%x, %x), true_computation=%one, false_computation=%body", 1),
    ],
)
def test_memory_traffic_counts_results_twice_and_loops_as_often_as_they_run(line, written):
    assert memory_traffic(LOOP.format(kib=KIB, line=line)) == 2 * 1024 * written


def test_memory_traffic_of_a_conditional_is_that_of_the_larger_branch():
    text = LOOP.format(kib=KIB, line=f"%a = {KIB} conditional(%x), branch_computations={{%one, %body}}")
    assert memory_traffic(text.replace(f"%c = {KIB}", "%c = f32[1024]{0}")) == 2 * 4096


@pytest.mark.parametrize(("root", "runs"), [("compare(%i, %n), direction=LT", 24), ("and(%i, %n)", 1)])
def test_rounds_of_a_loop_are_those_of_its_condition_if_it_counts(root, runs):
    """As XLA for TPUs writes the loops of ``jax.lax.scan``, which count from 0."""
    counts = ["%limit (x: s32[]) -> pred[] {", "  %n = s32[]{:T(128)} constant(24)", f"  ROOT %c = pred[] {root}", "}"]
    line = f"%a = {KIB} while(%x), condition=%limit, body=%body"
    assert memory_traffic("\n".join([*counts, LOOP.format(kib=KIB, line=line)])) == 2 * 1024 * runs


UPDATES = """%fused (p0: f32[100,256], p1: f32[256], p2: s32[]) -> f32[100,256] {
  %p0 = f32[100,256]{1,0} parameter(0)
  %u = f32[1,256]{1,0} bitcast(%p1)
  ROOT %d = f32[100,256]{1,0} dynamic-update-slice(%p0, %u, %p2, %p2)
}
%both (p0: f32[100,256], p1: f32[256], p2: s32[]) -> (f32[25600], f32[256]) {
  %u = f32[1,256]{1,0} bitcast(%p1)
  %d = f32[100,256]{1,0} dynamic-update-slice(%p0, %u, %p2, %p2)
  %b = f32[25600]{0} bitcast(%d)
  ROOT %t = (f32[25600]{0}, f32[256]{0}) tuple(%b, %p1)
}
%read (p0: f32[100,256], p1: f32[256], p2: s32[]) -> f32[100,256] {
  %d = f32[100,256]{1,0} dynamic-update-slice(%p0, %u, %p2, %p2)
  ROOT %n = f32[100,256]{1,0} negate(%d)
}
ENTRY %main (x: f32[100,256]) -> f32[100,256] {
  %row = f32[1,256]{1,0} parameter(1)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("%a = f32[100,256]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused", 1),
        ("%a = f32[100,256]{1,0} dynamic-update-slice(%x, %row, %i, %i)", 1),
        ("%a = (f32[25600]{0}, f32[256]{0}) fusion(%x, %y, %i), kind=kLoop, calls=%both", 2),
        ("%a = (f32[25600]{0:S(1)}, f32[256]{0}) fusion(%x, %y, %i), kind=kLoop, calls=%both", 1),
        ("%a = f32[100,256]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%read", 100),
    ],
)
def test_memory_traffic_of_an_update_in_place_is_that_of_the_update(line, rows):
    assert memory_traffic(UPDATES.replace("LINE", line)) == 2 * 1024 * rows


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}, use_global_device_ids=true", (0, 1, 2)),
        ("replica_groups={{0,2},{1,3}}, use_global_device_ids=true", (0, 2)),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (0, 4)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%add", (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%add", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}, to_apply=%add", (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=3], device_ids=([2,6]T(1,0)) {'b'}, to_apply=%add", (0, 7)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}, to_apply=%add", (0, 2)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, to_apply=%add", (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}, to_apply=%add", (0, 2)),
        ("to_apply=%add", None),
    ],
)
def test_the_first_group_of_devices_is_read(groups, first):
    assert collectives(f"  %r = f32[4]{{0}} all-reduce(%x), channel_id=1, {groups}") == [
        Collective("all-reduce", 16, first)
    ]


def test_groups_are_those_of_a_mesh_that_xla_has_compiled():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    for axis, first in (("data", (0, 4)), ("model", (0, 1, 2, 3))):
        sum_over = functools.partial(jax.lax.psum, axis_name=axis)
        others = P(None, "model") if axis == "data" else P("data")
        summed = jax.shard_map(sum_over, mesh=mesh, in_specs=P("data", "model"), out_specs=others)
        program = jax.jit(summed).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()
        assert [each.group for each in collectives(program.as_text() or "")] == [first]


def test_senders_and_receivers_of_a_permute_are_read():
    line = "  %r = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,0}}"
    assert collectives(line) == [Collective("collective-permute", 16, (0, 1, 1, 2, 2, 0))]
