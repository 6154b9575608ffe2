"""The format of tapes, as the tests convert it, is the one that device/images.py states."""

import pytest
import torch

from tests.gpu.kda_problems import from_image, to_image


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_images_lie_in_memory_as_stated(rows: int, columns: int) -> None:
    tiles = torch.arange(3 * rows * columns).view(3, rows, columns)
    entries = to_image(tiles)
    for r in range(rows):
        for c in range(columns):
            place = c // 64 * 64 * rows + 64 * r + 8 * ((c % 64 // 8) ^ (r % 8)) + c % 8
            assert entries[1, place] == tiles[1, r, c]
    assert torch.equal(from_image(entries, rows, columns), tiles)
