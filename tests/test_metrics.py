"""Metrics compared with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coda_prompt.research.bench import metrics

NAN = math.nan
R = [[0.9, NAN, NAN], [0.6, 0.8, NAN], [0.7, 0.5, 1.0]]


def test_average_accuracy_is_the_mean_over_tasks_of_the_last_row() -> None:
    assert metrics.average_accuracy(R) == pytest.approx((0.7 + 0.5 + 1.0) / 3)


def test_weighted_accuracy_counts_images() -> None:
    assert metrics.weighted_accuracy(R, [10, 10, 20]) == pytest.approx((7 + 5 + 20) / 40)


def test_average_incremental_accuracy_is_the_mean_over_time() -> None:
    assert metrics.accuracy_after_each_task(R) == pytest.approx([0.9, 0.7, 2.2 / 3])
    assert metrics.average_incremental_accuracy(R) == pytest.approx((0.9 + 0.7 + 2.2 / 3) / 3)


def test_learning_accuracy_is_the_mean_of_the_diagonal() -> None:
    assert metrics.learning_accuracy(R) == pytest.approx(0.9)


def test_forgetting_of_the_released_code_is_the_mean_drop_from_task_to_task() -> None:
    second = 0.9 - 0.6
    third = ((0.6 - 0.7) + (0.8 - 0.5)) / 2
    assert metrics.forgetting_paper(R) == pytest.approx((second + third) / 2)


def test_max_forgetting_is_the_drop_from_the_best_accuracy() -> None:
    assert metrics.forgetting_per_task(R) == pytest.approx([0.9 - 0.7, 0.8 - 0.5])
    assert metrics.forgetting_max(R) == pytest.approx((0.2 + 0.3) / 2)


def test_improvement_counts_as_negative_forgetting() -> None:
    better = [[0.5, NAN], [0.7, 0.9]]
    assert metrics.forgetting_max(better) == pytest.approx(-0.2)
    assert metrics.forgetting_paper(better) == pytest.approx(-0.2)


DOMAINS = [[0.9, 0.5, 0.3], [0.8, 0.7, 0.4], [0.85, 0.6, 0.9]]
"""Three domains of the same ten classes: all are measured from the first task on."""


def test_backward_transfer_is_the_change_since_a_task_was_learned() -> None:
    assert metrics.backward_transfer(R) == pytest.approx(((0.7 - 0.9) + (0.5 - 0.8)) / 2)
    assert metrics.backward_transfer([[0.5]]) == 0


def test_forward_transfer_is_the_accuracy_before_learning_above_chance() -> None:
    assert metrics.forward_transfer(DOMAINS, 10) == pytest.approx((0.5 + 0.4) / 2 - 0.1)
    assert math.isnan(metrics.forward_transfer(R, 10)), "no class is known before"
    mixed = [[0.9, NAN, 0.3], [0.8, 0.7, 0.4], [0.8, 0.6, 0.9]]
    assert metrics.forward_transfer(mixed, 10) == pytest.approx(0.4 - 0.1)


def test_groups_may_be_learned_in_another_order_than_their_columns() -> None:
    columns = np.array(DOMAINS)[:, [2, 0, 1]]
    learned = [2, 0, 1]
    assert metrics.average_accuracy(columns, learned) == pytest.approx(2.35 / 3)
    for measure in (
        metrics.learning_accuracy,
        metrics.forgetting_paper,
        metrics.forgetting_max,
        metrics.backward_transfer,
        metrics.average_incremental_accuracy,
    ):
        assert measure(columns, learned) == pytest.approx(measure(DOMAINS))
    with pytest.raises(ValueError, match="2 groups do not fit"):
        metrics.average_accuracy(columns, [0, 1])


def test_harmonic_mean_of_base_and_new_accuracy() -> None:
    assert metrics.harmonic_mean(0.6, 0.3) == pytest.approx(0.4)
    assert metrics.harmonic_mean(0.0, 0.0) == 0


def test_area_under_the_curve_weighs_measured_accuracies_by_their_images() -> None:
    curve = [0.8, NAN, 0.5]
    assert metrics.area_under_curve(curve, [10, 20, 40]) == pytest.approx((8 + 15) / 40)
    assert math.isnan(metrics.area_under_curve([NAN], [10]))


def test_a_task_without_test_images_has_no_weight() -> None:
    assert metrics.weighted_accuracy([[0.5, NAN], [0.5, NAN]], [10, 0]) == 0.5


def test_forgetting_of_one_task_is_zero() -> None:
    assert metrics.forgetting_paper([[0.5]]) == 0
    assert metrics.forgetting_max([[0.5]]) == 0


def test_upper_bound_has_only_a_last_row() -> None:
    matrix = np.full((3, 3), NAN)
    matrix[2] = [0.5, 0.6, 0.7]
    assert metrics.average_accuracy(matrix) == pytest.approx(0.6)
    assert math.isnan(metrics.forgetting_paper(matrix))
    assert math.isnan(metrics.forgetting_max(matrix))
    assert math.isnan(metrics.learning_accuracy(matrix))


def test_matrix_that_is_not_square_raises() -> None:
    with pytest.raises(ValueError, match="square"):
        metrics.average_accuracy([[0.1, 0.2]])


def test_deviation_over_trials_is_that_of_the_population() -> None:
    summary = metrics.summarise([1.0, 2.0, 3.0, 4.0])
    assert summary.mean == 2.5
    assert summary.std == pytest.approx(math.sqrt(1.25))


@pytest.mark.parametrize(
    ("freedom", "probability", "quantile"),  # from printed tables of Student's distribution
    [
        (1, 0.975, 12.706),
        (2, 0.975, 4.303),
        (4, 0.975, 2.776),
        (9, 0.95, 1.833),
        (30, 0.995, 2.750),
    ],
)
def test_student_quantiles_equal_published_tables(
    freedom: int, probability: float, quantile: float
) -> None:
    assert metrics.student_quantile(probability, freedom) == pytest.approx(quantile, abs=6e-4)


def test_paired_differences_pair_values_by_seed() -> None:
    found = metrics.paired_difference([3.0, 5.0, 7.0], [1.0, 2.0, 3.0])
    assert found.mean == pytest.approx(3.0)
    reach = 4.302653 * 1.0 / math.sqrt(3)
    assert found.interval == pytest.approx((3.0 - reach, 3.0 + reach), abs=1e-4)
    assert metrics.paired_difference([3.0], [1.0]).interval is None
