"""The scaling of inputs: the result is float32, whatever the type of the inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.training.normalisation import normalise

MEAN, STD = np.array([0.5], np.float32), np.array([0.25], np.float32)


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int64, np.float32, np.float64])
def test_inputs_of_every_type_become_float32(kind: type[np.generic]) -> None:
    x = np.array([[0, 1], [1, 0]], kind)
    expected = np.array([[-2, 2], [2, -2]], np.float32)
    as_array = normalise(x, (MEAN, STD))
    as_tensor = normalise(torch.from_numpy(x), (torch.from_numpy(MEAN), torch.from_numpy(STD)))
    assert as_array.dtype == np.float32
    assert as_tensor.dtype == torch.float32
    np.testing.assert_array_equal(as_array, expected)
    np.testing.assert_array_equal(as_tensor.numpy(), expected)


def test_inputs_without_a_scaling_stay_as_they_are() -> None:
    x = np.array([[1, 2]], np.int64)
    assert normalise(x, None) is x
