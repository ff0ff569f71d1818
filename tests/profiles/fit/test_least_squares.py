from __future__ import annotations

import numpy as np
import pytest

from claw_plan.profiles.fit.least_squares import Array, fit_parameters

X = np.linspace(0, 3, 40)


def fitted(y: Array, spread: float = 10.0) -> Array:
    def residuals(p: Array) -> Array:
        return np.asarray(np.log(np.exp(p[0]) + np.exp(p[1]) * X) - np.log(y))

    zero = np.zeros(2)
    return fit_parameters(residuals, zero, prior=zero, spread=np.full(2, spread))


def test_planted_constants_are_found() -> None:
    assert np.exp(fitted(0.5 + 4 * X)) == pytest.approx([0.5, 4], rel=1e-3)


def test_a_few_disturbed_rows_hardly_matter() -> None:
    y = 0.5 + 4 * X
    y[[7, 20, 33]] *= 5
    assert np.exp(fitted(y)) == pytest.approx([0.5, 4], rel=0.05)


def test_a_constant_the_data_say_nothing_about_keeps_its_prior() -> None:
    def residuals(p: Array) -> Array:
        return np.asarray(p[0] - np.full(5, 2.0))

    prior = np.array([0.0, 7.0])
    found = fit_parameters(residuals, prior, prior=prior, spread=np.array([10.0, 1.0]))
    assert found == pytest.approx([2.0, 7.0], abs=1e-3)
