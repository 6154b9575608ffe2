"""The measure that the tests on hardware use must notice one wrong tile among many right ones."""

import pytest

from tests.gpu.kda_problems import Case, assert_close, call, truth

CASE = Case(1, 200, 1, 2, 64, 64, offsets=(3, 70, 200))


@pytest.fixture(scope="module")
def expected():
    return truth(CASE, call(CASE, device="cpu"))


def test_rounded_results_pass(expected):
    assert_close("h", expected.given["h"], expected.scan.h, 2.5e-3, 3e-3)


@pytest.mark.parametrize("fault", ["scaled", "zero", "nan", "neighbour"])
def test_one_wrong_tile_is_noticed(expected, fault):
    got = expected.given["dvn"].clone()
    tile = got[2, 1]
    tile.copy_({"scaled": 1.02 * tile, "zero": 0 * tile, "nan": tile / 0 * 0, "neighbour": got[2, 0]}[fault])
    with pytest.raises(AssertionError, match=r"dvn: error"):
        assert_close("dvn", got, expected.reverse_scan.dvn, 2.5e-3, 3e-3)


def test_chunks_are_those_of_the_reference_layout(expected):
    chunks = CASE.chunks()
    assert chunks == [[0, 0, 3, 64], [0, 0, 67, 3], [1, 0, 70, 64], [1, 0, 134, 64], [1, 0, 198, 2]]
    packing = expected.table.packing
    assert packing.owner[:5].tolist() == [c[0] for c in chunks]
    assert packing.token[:5, 0].tolist() == [c[2] for c in chunks]
    assert packing.valid[:5].sum(1).tolist() == [c[3] for c in chunks]
