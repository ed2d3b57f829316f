"""Finding, configuring and bringing methods, and what a user can get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import PLAIN_VIEWS, brief, patterns, tiny_vit

from coda_prompt import methods
from coda_prompt.data.stream import cut
from coda_prompt.errors import BadMethod, BadOption, OddPromptLength, TooManyBlocks, UnknownName
from coda_prompt.training.engine import Engine, Training

OF_THE_PAPER = {
    "upper-bound",
    "er-5000",
    "ft",
    "ft++",
    "lwf-mc",
    "l2p++",
    "deep-l2p++",
    "dualprompt",
    "coda-p-s",
    "coda-p",
}


def test_every_method_of_the_paper_and_two_yardsticks_are_there() -> None:
    assert set(methods.METHODS) == OF_THE_PAPER | {"ncm", "ranpac"}


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
    with pytest.raises(OddPromptLength, match=rf"{option} = 7 is odd.*Use 6 or 8"):
        methods.make(name, tiny_vit(), **{option: 7})


@pytest.mark.parametrize(
    ("name", "option"),
    [("coda-p", "blocks"), ("deep-l2p++", "blocks"), ("dualprompt", "expert_blocks")],
)
def test_more_prompted_blocks_than_the_vit_has_are_refused(name: str, option: str) -> None:
    with pytest.raises(TooManyBlocks, match="this ViT has 6 blocks"):
        methods.make(name, tiny_vit(), **{option: (4, 5, 6)})


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no option 'lenght'\. Did you mean 'length'"):
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
    with pytest.raises(BadOption, match=r"\[1\] already have general prompts"):
        methods.make("dualprompt", tiny_vit(), expert_blocks=(1, 2))


MINE = '''
from coda_prompt.methods.l2p import L2P

class Mine(L2P):
    """L2P++ with twice the key loss."""
    def training_prefixes(self, queries):
        prefixes, total = super().training_prefixes(queries)
        return prefixes, 2 * total
'''


def test_a_method_from_a_file_learns_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    method = methods.make(f"{path}:Mine", tiny_vit(), pool=6)
    Engine(PLAIN_VIEWS, Training(epochs=1)).run(method, cut(patterns(4, 4), tasks=2))
    assert method.logits(torch.rand(2, 1, 16, 16)).shape == (2, 4)


@pytest.mark.parametrize(
    ("content", "name", "problem"),
    [
        (MINE, "Other", "no method class 'Other'"),
        ("class Mine: pass", "Mine", "no method class 'Mine'"),
        ("import nothing_of_that_name", "Mine", "nothing_of_that_name"),
        ("def broken(:", "Mine", "invalid syntax"),
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
    with pytest.raises(BadMethod, match="no file"):
        methods.find(f"{tmp_path}/nowhere.py:Mine")


def test_new_classes_must_follow_the_known_ones() -> None:
    method = methods.make("coda-p", tiny_vit())
    method.begin_task(brief(method, new=2))
    method.end_task()
    gap = methods.TaskBrief(1, 0, (3, 4), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="new classes must be rows 2"):
        method.begin_task(gap)


def test_dualprompt_at_inference_considers_only_tasks_learned_so_far() -> None:
    method = methods.make("dualprompt", tiny_vit())
    for tasks in (1, 2):
        method.begin_task(brief(method, new=2))
        method.end_task()
        assert method.keys.shape[1] == tasks


def test_ranpac_is_ridge_regression_on_all_images_so_far() -> None:
    method = methods.make("ranpac", tiny_vit(), width=24, ridge=3.0)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(20, 32, generator=generator)
    labels = torch.tensor([0, 1] * 5 + [2, 3, 1] * 3 + [2])
    for part in (slice(0, 10), slice(10, 20)):
        known = (1,) if part.start else ()
        method.begin_task(brief(method, new=2, known=known))
        method.fit(queries[part], labels[part])
        method.end_task()
    hidden = method.hidden(queries).double()
    targets = torch.nn.functional.one_hot(labels).double()
    damped = hidden.T @ hidden + 3.0 * torch.eye(24, dtype=torch.float64)
    expected = torch.linalg.solve(damped, hidden.T @ targets)
    torch.testing.assert_close(method.weight.double(), expected, rtol=1e-4, atol=1e-6)


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
        method.fit(queries, labels)
        chosen[kind] = float(method.ridge)
    assert chosen["noise"] > 10 * chosen["clusters"]


def test_ranpac_is_wide_but_bounded() -> None:
    assert methods.make("ranpac", tiny_vit()).projected == 16 * 32


def test_nearest_class_mean_is_the_cosine_to_the_mean_of_all_images_so_far() -> None:
    method = methods.make("ncm", tiny_vit())
    queries = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    method.begin_task(brief(method, new=2))
    method.fit(queries[:4], torch.tensor([0, 0, 1, 1]))
    method.begin_task(brief(method, new=0, known=(1,)))
    method.fit(queries[4:], torch.tensor([1, 1]))
    mean = queries[2:].mean(dim=0)
    expected = torch.nn.functional.cosine_similarity(queries[0], mean, dim=0)
    torch.testing.assert_close(method.scores(queries[:1])[0, 1], expected)
