"""Finding, configuring and bringing methods, and what a user can get wrong."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import PAPER_METHODS, PLAIN_VIEWS, brief, patterns, tiny_vit

from coda_prompt.errors import (
    BadMethod,
    BadOption,
    InvalidLabels,
    UnfinishedTask,
    UnknownName,
)
from coda_prompt.research import methods
from coda_prompt.research.methods import TrainingBatch
from coda_prompt.research.methods.head import Head
from coda_prompt.research.streams.stream import Task, make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.loading import batches
from coda_prompt.research.training.settings import Training
from coda_prompt.statistics.moments import shrink_covariance

OTHERS = {
    *("ncm", "ranpac", "slda", "coda-p-ranpac", "sd-lora", "inflora", "os-prompt", "loranpac"),
    *("slca", "ease", "aper", "tuna", "vq-prompt", "hide-prompt"),
}


def test_registry_has_every_method_of_the_paper_and_others() -> None:
    assert set(methods.METHODS) >= {*PAPER_METHODS} | OTHERS


def test_every_name_of_a_registered_class_is_registered() -> None:
    for name, entry in methods.METHODS.items():
        assert {*entry.type.variants} <= {*methods.METHODS}, name
        assert all(methods.METHODS[other].type is entry.type for other in entry.type.variants)


def test_looking_up_a_method_imports_no_other() -> None:
    program = (
        "import sys\nfrom coda_prompt.research import methods\n"
        "assert 'ease' in methods.METHODS\nmethods.find('ranpac')\n"
        "print([name for name in ('closedform', 'coda', 'ease') "
        "if f'coda_prompt.research.methods.{name}' in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "['closedform']\n", run.stderr


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("coda-p", "length"),
        ("l2p++", "length"),
        ("dualprompt", "general_length"),
        ("dualprompt", "expert_length"),
    ],
)
def test_an_odd_prompt_length_is_refused(name: str, option: str) -> None:
    with pytest.raises(BadOption, match=rf"{option} = 7 is odd.*Use 6 or 8"):
        methods.make(name, tiny_vit(), **{option: 7})


def test_a_prompt_of_one_row_is_odd_too() -> None:
    with pytest.raises(BadOption, match=r"length = 1 is odd.*Use 2 or more"):
        methods.make("coda-p", tiny_vit(), length=1)


@pytest.mark.parametrize("blocks", [(), (0, 1, 1)])
def test_no_block_or_one_twice_is_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(BadOption, match=r"names a block twice|at least one block"):
        methods.make("coda-p", tiny_vit(), blocks=blocks)


@pytest.mark.parametrize(
    ("name", "option"),
    [("coda-p", "blocks"), ("deep-l2p++", "blocks"), ("dualprompt", "expert_blocks")],
)
def test_more_prompted_blocks_than_the_vit_has_are_refused(name: str, option: str) -> None:
    with pytest.raises(BadOption, match="this ViT has 6 blocks"):
        methods.make(name, tiny_vit(), **{option: (4, 5, 6)})


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no option 'lenght' in coda-p\. Did you mean 'length'"):
        methods.make("coda-p", tiny_vit(), lenght=8)


def test_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no method 'codap'\. Did you mean 'coda-p'"):
        methods.make("codap", tiny_vit())


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("coda-p", "components", "many"),
        ("coda-p", "components", 0),
        ("coda-p", "preset", "release-2024"),
        ("ft", "head_init", "zero"),
        ("ranpac", "ridge", -1),
        ("l2p++", "top", 31),
    ],
)
def test_an_unusable_value_names_the_option(name: str, option: str, value: object) -> None:
    with pytest.raises(BadOption, match=f"Option '{option}'"):
        methods.make(name, tiny_vit(), **{option: value})


def test_general_and_expert_prompts_cannot_share_a_block() -> None:
    with pytest.raises(BadOption, match=r"\[1\] already have prompts by 'general_blocks'"):
        methods.make("dualprompt", tiny_vit(), expert_blocks=(1, 2))


MINE = '''
from coda_prompt.research.methods.l2p import L2P

class Mine(L2P):
    """L2P++ with twice the key loss."""
    def training_prefixes(self, queries):
        prefixes, total = super().training_prefixes(queries)
        return prefixes, 2 * total
'''


WITH_OPTIONS = '''
from __future__ import annotations
from pydantic import Field
from pydantic.dataclasses import dataclass
from coda_prompt.research.methods.l2p import L2P, L2PConfig

@dataclass(frozen=True)
class MineConfig(L2PConfig):
    pull: float = Field(default=2.0, ge=0)
    """How much harder keys are pulled."""

class Mine(L2P):
    """L2P++ with a stronger key loss."""
    Config = MineConfig
    def training_prefixes(self, queries):
        prefixes, total = super().training_prefixes(queries)
        return prefixes, self.config.pull * total
'''


def test_a_method_from_a_file_may_have_options_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(WITH_OPTIONS)
    method = methods.make(f"{path}:Mine", tiny_vit(), pull=3, pool=6)
    assert method.config.pull == 3
    described = methods.describe(f"{path}:Mine")
    assert described["options"][-1] == {
        "name": "pull",
        "default": 2.0,
        "meaning": "How much harder keys are pulled.",
    }
    with pytest.raises(UnknownName, match="Did you mean 'pull'"):
        methods.make(f"{path}:Mine", tiny_vit(), pul=3)


@pytest.mark.parametrize(
    ("content", "name", "problem"),
    [
        (MINE, "Other", "there is no class 'Other'"),
        ("class Mine: pass", "Mine", "'Mine' does not inherit from"),
        ("import nothing_of_that_name", "Mine", "nothing_of_that_name"),
        ("def broken(:", "Mine", "invalid syntax"),
        (
            WITH_OPTIONS.replace("pydantic.dataclasses", "dataclasses"),
            "Mine",
            "not a pydantic dataclass|cannot be loaded",
        ),
    ],
)
def test_a_file_without_a_usable_method_is_refused(
    content: str, name: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(BadMethod, match=problem):
        methods.find(f"{path}:{name}")


def test_a_missing_method_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadMethod, match="No such file"):
        methods.find(f"{tmp_path}/nowhere.py:Mine")


def test_logits_are_not_rounded_in_bfloat16() -> None:
    head = Head(8)
    head.begin_task((0, 1, 2), torch.Generator().manual_seed(0), None)
    features, labels = torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])
    exact = head(features), head.masked_loss(features, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(features), exact[0])
        assert torch.equal(head.masked_loss(features, labels), exact[1])


def test_new_classes_must_follow_the_known_ones() -> None:
    method = methods.make("coda-p", tiny_vit())
    method.begin_task(brief(method, new=2))
    method.end_task()
    gap = methods.TaskBrief(1, 0, (3, 4), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(
        InvalidLabels, match=r"2 classes are known, new ones cannot be rows \[3, 4\]"
    ):
        method.begin_task(gap)


def test_dualprompt_at_inference_considers_only_tasks_learned_so_far() -> None:
    method = methods.make("dualprompt", tiny_vit())
    for tasks in (1, 2):
        method.begin_task(brief(method, new=2))
        method.end_task()
        assert len(method.keys) == tasks


def test_ranpac_is_ridge_regression_on_all_images_so_far() -> None:
    method = methods.make("ranpac", tiny_vit(), width=24, ridge=3.0)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(20, 32, generator=generator)
    labels = torch.tensor([0, 1] * 5 + [2, 3, 1] * 3 + [2])
    for part in (slice(0, 10), slice(10, 20)):
        known = (1,) if part.start else ()
        method.begin_task(brief(method, new=2, known=known))
        method.fit(queries[part], None, labels[part])
        method.end_task()
    assert float(method.statistics.ridge) == 3.0
    hidden = method.statistics.hidden(queries).double()
    targets = torch.nn.functional.one_hot(labels).double()
    damped = hidden.T @ hidden + 3.0 * torch.eye(24, dtype=torch.float64)
    expected = torch.linalg.solve(damped, hidden.T @ targets)
    torch.testing.assert_close(
        method.statistics.weight.frozen.double(), expected, rtol=1e-4, atol=1e-6
    )


def test_ranpac_chooses_its_ridge_on_a_held_out_fifth() -> None:
    """Labels without a pattern want a large ridge, clean clusters a small one."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100, 32, generator=generator)
    centres = torch.randn(2, 32, generator=generator)
    labels = torch.randint(2, (100,), generator=generator)
    chosen = {}
    for kind, queries in (("noise", noise), ("clusters", centres[labels] + 0.01 * noise)):
        method = methods.make("ranpac", tiny_vit())
        method.begin_task(brief(method, new=2))
        method.fit(queries, None, labels)
        chosen[kind] = float(method.statistics.ridge)
    assert chosen["noise"] > 10 * chosen["clusters"]


@pytest.mark.parametrize("order", ["sorted", "cyclic"])
def test_ranpac_is_independent_of_the_order_of_images(order: str) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5).repeat_interleave(20)
    labels = labels if order == "sorted" else labels.view(5, 20).T.flatten()
    centres = 2 * torch.randn(5, 32, generator=generator)
    queries = centres[labels] + torch.randn(100, 32, generator=generator)
    method = methods.make("ranpac", tiny_vit())
    method.begin_task(brief(method, new=5))
    method.fit(queries, None, labels)
    assert float(method.statistics.ridge) < 1e5
    fresh = centres[labels] + torch.randn(100, 32, generator=generator)
    assert (method.scores(fresh).argmax(dim=1) == labels).float().mean() > 0.95


def test_ranpac_warns_if_a_ridge_is_below_the_resolution_of_its_statistics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    method = methods.make("ranpac", tiny_vit(), ridge=1e-9)
    method.begin_task(brief(method, new=2))
    with caplog.at_level("INFO"):
        method.fit(torch.randn(20, 32), None, torch.arange(20) % 2)
    assert float(method.statistics.ridge) > 1e-9
    assert "raised" in caplog.text


def test_ranpac_is_wide_but_bounded() -> None:
    assert methods.make("ranpac", tiny_vit()).statistics.projected == 16 * 32


def test_the_gram_matrix_is_kept_as_a_triangle() -> None:
    method = methods.make("ranpac", tiny_vit(), width=24, ridge=3.0)
    method.begin_task(brief(method, new=2))
    queries = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    method.fit(queries, None, torch.arange(20) % 2)
    hidden = method.statistics.hidden(queries)
    gram = hidden.T @ hidden
    rows, columns = torch.triu_indices(24, 24)
    assert_close = partial(torch.testing.assert_close, check_dtype=False)
    assert_close(method.statistics.gram, gram[rows, columns])
    assert_close(method.statistics._unpacked(), gram)


def test_coda_with_ranpac_s_classifier_adapts_in_the_first_task_only() -> None:
    """After it, it is RanPAC on prompted features, whatever comes."""
    source = patterns(6, train=8)
    tasks = make_stream(source, tasks=3, seed=0).tasks
    method = methods.make("coda-p-ranpac", tiny_vit(), components=4, width=64, ridge=1.0)
    driver = Engine(PLAIN_VIEWS, Training(epochs=2, batch_size=8))
    assert len(driver.learn(method, tasks[0])) == 2
    prompts = {kind: getattr(method, kind).frozen.clone() for kind in method.prompts.prompt_banks}
    assert prompts["components"].shape[1] > 0
    for task in tasks[1:]:
        assert driver.learn(method, task) == [], "nothing trains"
    for kind, before in prompts.items():
        assert torch.equal(getattr(method, kind).frozen, before)
    images = torch.stack([view for view, _, _ in _views(tasks)])
    labels = torch.tensor([label for _, label, _ in _views(tasks)])
    with torch.no_grad():
        features = method.features(images, method.queries(images))
    hidden = method.statistics.hidden(features).double()
    targets = torch.nn.functional.one_hot(labels).double()
    damped = hidden.T @ hidden + torch.eye(64, dtype=torch.float64)
    expected = hidden @ torch.linalg.solve(damped, hidden.T @ targets)
    torch.testing.assert_close(method.logits(images).double(), expected, rtol=1e-3, atol=1e-4)


def _views(tasks: tuple[Task, ...]) -> list[tuple[torch.Tensor, int, int]]:
    found = []
    for task in tasks:
        order = [list(range(len(task.train)))]
        (batch,) = batches(task.train, PLAIN_VIEWS, order)
        found += list(zip(batch.images, batch.labels.tolist(), batch.positions, strict=True))
    return found


def test_nearest_class_mean_is_the_cosine_to_the_mean_of_all_images_so_far() -> None:
    method = methods.make("ncm", tiny_vit())
    queries = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    method.begin_task(brief(method, new=2))
    method.fit(queries[:4], None, torch.tensor([0, 0, 1, 1]))
    method.end_task()
    method.begin_task(brief(method, new=0, known=(1,)))
    method.fit(queries[4:], None, torch.tensor([1, 1]))
    mean = queries[2:].mean(dim=0)
    expected = torch.nn.functional.cosine_similarity(queries[0], mean, dim=0)
    torch.testing.assert_close(method.scores(queries[:1])[0, 1], expected)


def test_slda_is_the_gaussian_with_shared_covariance_of_all_images_so_far() -> None:
    method = methods.make("slda", tiny_vit(), shrinkage=0.1, normalize=False)
    features = torch.randn(60, 32, generator=torch.Generator().manual_seed(0)).double() + 5
    labels = torch.tensor([0, 1] * 15 + [2, 3, 1] * 10)
    for part in (slice(0, 30), slice(30, 60)):
        known = (1,) if part.start else ()
        method.begin_task(brief(method, new=2, known=known))
        method.fit(features[part].float(), None, labels[part])
        method.end_task()

    means, scatter = [], torch.zeros(32, 32, dtype=torch.float64)
    for label in range(4):
        own = features[labels == label]
        means.append(own.mean(dim=0))
        for row in own:
            scatter += torch.outer(row - means[label], row - means[label])
    covariance = scatter / (60 - 4)
    shrunk = 0.9 * covariance + 0.1 * covariance.diagonal().mean() * torch.eye(32).double()
    gaussians = [torch.distributions.MultivariateNormal(mean, shrunk) for mean in means]
    expected = torch.stack([gaussian.log_prob(features) for gaussian in gaussians], dim=1)
    scores = method.scores(features.float()).double()
    torch.testing.assert_close(
        scores - scores.mean(dim=1, keepdim=True),
        expected - expected.mean(dim=1, keepdim=True),
        rtol=1e-3,
        atol=1e-3,
    )


def test_slda_of_one_image_per_class_is_the_nearest_class_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, others = torch.randn(2, 30, 32, generator=generator)
    both = [methods.make(name, tiny_vit()) for name in ("slda", "ncm")]
    for method in both:
        method.begin_task(brief(method, new=30))
        method.fit(queries, None, torch.arange(30))
    answers = [method.scores(others).argmax(dim=1) for method in both]
    assert torch.equal(*answers)
    assert torch.equal(both[0].scores(queries).argmax(dim=1), torch.arange(30))


def test_slda_shrinks_less_with_more_images() -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(32, 32, generator=generator)
    smallest = []
    for images in (8, 80, 800):
        method = methods.make("slda", tiny_vit())
        method.begin_task(brief(method, new=2))
        features = torch.randn(images, 32, generator=generator) @ mixing
        method.fit(features, None, torch.arange(images) % 2)
        covariance, freedom = method.moments.value.covariance()
        eigenvalues = np.linalg.eigvalsh(shrink_covariance(covariance, freedom))
        smallest.append(eigenvalues[0] / eigenvalues.mean())
    assert smallest == sorted(smallest, reverse=True)


def test_slda_keeps_its_sums_in_double_precision_when_it_is_moved() -> None:
    method = methods.make("slda", tiny_vit()).to("cpu", torch.float32)
    assert method.moments.within.dtype == torch.float64
    method.begin_task(brief(method, new=2))
    method.fit(torch.randn(10, 32), None, torch.arange(10) % 2)
    method.end_task()
    copy = methods.make("slda", tiny_vit())
    copy.load_learned_state(method.learned_state())
    assert copy.moments.within.dtype == torch.float64
    assert torch.equal(copy.moments.within, method.moments.within)


def test_a_task_cannot_begin_inside_another() -> None:
    method = methods.make("coda-p", tiny_vit())
    method.begin_task(brief(method, new=2))
    with pytest.raises(UnfinishedTask, match="coda-p is in the middle of a task"):
        method.begin_task(brief(method, new=2))


@pytest.mark.parametrize("name", ["l2p++", "deep-l2p++", "dualprompt"])
def test_the_key_loss_has_a_weight(name: str) -> None:
    queries = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    totals = []
    for weight in (1.0, 0.25):
        method = methods.make(name, tiny_vit(), key_weight=weight)
        method.begin_task(brief(method, new=2))
        totals.append(method.training_prefixes(queries)[1])
    torch.testing.assert_close(totals[1], 0.25 * totals[0])
    assert float(totals[0].detach().min()) > 0


def test_dualprompts_general_prompts_train_in_every_task() -> None:
    method = methods.make("dualprompt", tiny_vit())
    method.begin_task(brief(method, new=2))
    with torch.no_grad():
        method.general.trainable.add_(1)
    trained = method.general.trainable.detach().clone()
    method.end_task()
    assert torch.equal(method.general.frozen, trained)
    method.begin_task(brief(method, new=2))
    assert torch.equal(method.general.trainable, trained)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preset": "paper", "tasks": 2, "components": 20},
        {"preset": "release-2022", "tasks": 2, "components": 20},
        {"orthogonality": False},
    ],
)
def test_keys_attention_and_components_start_independently(options: dict[str, Any]) -> None:
    method = methods.make("coda-p", tiny_vit(), length=2, **options)
    method.begin_task(brief(method, new=2))
    halves = [
        method.keys.trainable.detach(),
        method.attention.trainable.detach(),
        method.components.trainable.detach()[:, :, 0],
    ]
    for first, second in itertools.combinations(halves, 2):
        centred = [rows - rows.mean(dim=-1, keepdim=True) for rows in (first, second)]
        similarity = torch.nn.functional.cosine_similarity(*centred, dim=-1)
        assert float(similarity.abs().mean()) < 0.4


def test_fine_tuning_trains_old_rows_and_the_masked_form_does_not() -> None:
    first, second = make_stream(patterns(4, 5), tasks=2).tasks
    for name, old_rows_change in (("ft", True), ("er-5000", True), ("ft++", False)):
        method = methods.make(name, tiny_vit())
        engine = Engine(PLAIN_VIEWS, Training(epochs=1))
        engine.learn(method, first)
        before = method.head.weight.frozen.clone()
        engine.learn(method, second, past=[first])
        changed = bool((method.head.weight.frozen[:2] != before).any())
        assert changed == old_rows_change, name


def lwf_in_second_task(known: tuple[int, ...] = ()) -> methods.Method:
    method = methods.make("lwf-mc", tiny_vit())
    method.begin_task(brief(method, new=3))
    method.end_task()
    method.begin_task(brief(method, new=2, known=known))
    return method


def test_lwfs_teacher_is_the_network_before_the_task() -> None:
    method = lwf_in_second_task()
    images = torch.rand(3, 1, 16, 16)
    before = method.teacher(images)
    with torch.no_grad():
        for parameter in method.trainable_parameters():
            parameter.add_(0.1)
    assert torch.equal(method.teacher(images), before)
    assert not any(parameter.requires_grad for parameter in method.teacher.parameters())


def test_lwf_takes_known_classes_of_the_task_from_its_labels() -> None:
    method = lwf_in_second_task(known=(1,))
    images, labels = torch.rand(3, 1, 16, 16), torch.tensor([1, 3, 4])
    teacher = method.teacher(images)
    targets = torch.zeros(3, 5)
    targets[:, [0, 2]] = teacher[:, [0, 2]]
    targets[range(3), labels] = 1
    outputs = method.logits(images).sigmoid()
    terms = -(targets * outputs.log() + (1 - targets) * (1 - outputs).log())
    found = method.loss(TrainingBatch(images, labels, None)).mean
    torch.testing.assert_close(found, terms.sum(dim=1), rtol=1e-5, atol=1e-5)


def replaying(buffer: int, labels: list[int]) -> methods.Method:
    """ER after one task with these labels."""
    method = methods.make("er-5000", tiny_vit(), buffer=buffer)
    classes = tuple(sorted(set(labels)))
    method.begin_task(methods.TaskBrief(0, 0, classes, torch.tensor(labels)))
    method.end_task()
    return method


def test_replay_draws_every_kept_image_with_replacement() -> None:
    method = replaying(100, [0, 1] * 20)
    drawn = method.replay(4000, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn[:, 1], minlength=40)
    assert counts.min() > 50
    assert counts.max() < 160
    few = method.replay(40, torch.Generator().manual_seed(0))
    assert len(set(few[:, 1].tolist())) < 40, "with replacement some come twice"


def test_the_buffer_is_a_random_sample_and_knows_its_images() -> None:
    labels = [0] * 50 + [1] * 50
    method = replaying(20, labels)
    kept = method.buffer.frozen
    assert all(labels[int(image)] == int(row) for _, image, row, _ in kept)
    of_class = sorted(kept[kept[:, 2] == 0, 1].tolist())
    assert len(of_class) == 10
    assert of_class != list(range(10))
    assert max(of_class) > 25


def test_later_images_of_a_known_class_enter_the_buffer() -> None:
    method = replaying(40, [0] * 50 + [1] * 50)
    method.begin_task(methods.TaskBrief(1, 0, (0, 1), torch.tensor([0] * 50 + [1] * 50)))
    method.end_task()
    from_second = int((method.buffer.frozen[:, 0] == 1).sum())
    assert len(method.buffer) == 40
    assert 10 < from_second < 30


def test_a_new_row_starts_as_a_linear_layer_would_start_it() -> None:
    method = methods.make("coda-p", tiny_vit())
    method.begin_task(brief(method, new=200))
    bound = 32**-0.5
    for values in (method.head.weight.trainable.detach(), method.head.bias.trainable.detach()):
        assert values.abs().max() <= bound
        assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_in_a_mixed_task_each_new_row_is_imprinted_from_its_own_class() -> None:
    method = methods.make("coda-p", tiny_vit(), head_init="imprint")
    means = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    for index, classes in enumerate([(0, 1), (1, 2, 3)]):
        none = torch.zeros(0, dtype=torch.int64)
        method.begin_task(methods.TaskBrief(index, 0, classes, none, means[list(classes)].clone))
        if index == 0:
            method.end_task()
    rows = method.head.weight.frozen[2:]
    cosine = torch.nn.functional.cosine_similarity(rows, means[2:4])
    torch.testing.assert_close(cosine, torch.ones(2))


def test_an_imprinted_row_has_the_mean_length_and_bias_of_older_rows() -> None:
    method = methods.make("coda-p", tiny_vit())
    method.begin_task(brief(method, new=2))
    with torch.no_grad():
        method.head.weight.trainable.copy_(torch.eye(2, 32) * torch.tensor([[1.0], [3.0]]))
        method.head.bias.trainable.copy_(torch.tensor([0.5, 1.5]))
    method.end_task()
    mean = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    method.begin_task(
        methods.TaskBrief(1, 0, (2,), torch.zeros(0, dtype=torch.int64), class_means=mean.clone)
    )
    method.end_task()
    expected = 2.0 * torch.nn.functional.normalize(mean, dim=1)[0]
    torch.testing.assert_close(method.head.weight.frozen[2], expected)
    assert float(method.head.bias.frozen[2]) == pytest.approx(1.0)
