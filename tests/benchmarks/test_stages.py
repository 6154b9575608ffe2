"""The stage table: its costs add up, launches become rows, machine code is found inside a library."""

import json
import struct

import pytest

from benchmarks import resources, stages
from benchmarks.case import Cost
from benchmarks.kda import KdaCase

CASE = KdaCase("x", 1, 8192, 32)


def event(name: str, microseconds: float, shared: int = 100_000) -> dict:
    facts = {"block": [384, 1, 1], "registers per thread": 168, "shared memory": shared}
    return {"cat": "kernel", "name": name, "dur": microseconds, "args": facts}


def test_products_of_the_stages_are_those_of_the_case():
    work = stages.costs(CASE)
    assert sum(cost.flops for cost in work.values()) == pytest.approx(CASE.cost().flops)
    assert sum(cost.bytes for cost in work.values()) == pytest.approx(2.7e9, rel=0.1)


@pytest.mark.parametrize(
    ("kernel", "stage"),
    [
        ("kernel_cutlass_group_sum_kernel_tensor_0", "group_sum"),
        ("kernel_cutlass_scans_kernel_Gmem_0", "scans"),
        ("kernel_cutlass_fill_equal_kernel_tensor_0", "chunk_table"),
        ("void at::native::copy", "other"),
    ],
)
def test_a_kernel_belongs_to_a_stage(kernel, stage):
    assert stages.stage_of(kernel) == stage


def test_rows_of_a_trace():
    local, table = "kernel_cutlass_local_kernel_x", "kernel_cutlass_fill_equal_kernel_x"
    events = [event(local, 400), event(table, 2), event(local, 500), event(table, 4), {"cat": "cpu_op"}]
    found = stages.from_trace(events, 2)
    rows = stages.stages(found, {"local": Cost(789e9 * 0.1, 4.23e9 * 0.225)}, {local: 8})
    assert [row.stage for row in rows] == ["local", "chunk_table"]
    assert rows[0].ms == pytest.approx(0.45) and rows[0].roofline_share == pytest.approx(0.5)
    assert rows[0].spills == 8 and rows[1].spills is None and rows[1].tflops is None
    assert rows[0].occupancy == pytest.approx(12 / 64)
    document = {"machine": {"gpu": "g", "torch": "t"}, "commit": "c", "date": "d"}
    document["cases"] = [{"case": "x", "stages": [vars(row) for row in rows]}]
    assert "| local | 0.450 |" in stages.table(json.loads(json.dumps(document)))


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "warps"), [(256, 128, 113 * 1024, 16), (512, 128, 230_000, 16), (32, 32, 0, 32)]
)
def test_occupancy(threads, registers, shared, warps):
    assert stages.occupancy(threads, registers, shared) == pytest.approx(warps / 64)


def test_machine_code_is_cut_out_of_a_library():
    header = struct.pack("<4s12xHHIQQQIHHHHHH", b"\x7fELF", 2, 190, 1, 0, 0, 70, 0, 64, 0, 0, 10, 2, 0)
    image = header + bytes(70 - len(header)) + b"sections of 20 bytes"
    other = header.replace(struct.pack("<H", 190), struct.pack("<H", 62))
    assert resources.cubins(b"\x7fELF host" + other + bytes(40) + image + b"rest") == [image]
