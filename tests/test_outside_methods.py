"""Models made with a method from a user's file, `file.py:Class`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from small import PLAIN_VIEWS, coda, patterns, tiny_vit
from torch import Tensor

from coda_prompt.cli import _error_in_method
from coda_prompt.research import methods
from coda_prompt.research.methods.base import MethodConfig
from coda_prompt.research.methods.closedform import ClosedForm, NearestClassMean
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Training
from coda_prompt.research.vit.vit import ViT

MINE = """
from pathlib import Path
from coda_prompt.research.methods.closedform import NearestClassMean

class Mine(NearestClassMean):
    "Nearest class mean, from a file."
"""


WIDER = """
import torch
from coda_prompt.research.methods.coda_ranpac import CodaRanPAC

class Mine(CodaRanPAC):
    "Tokens with the query, which is one more token."

    def feature_width(self):
        return super().feature_width() + self.vit_config.width

    def features(self, images, queries):
        queries = self.queries(images) if queries is None else queries
        return torch.cat([queries, super().features(images, queries)], dim=1)
"""


@pytest.fixture
def method(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py:Mine"


CLOSED_FORM = """
from coda_prompt.research.methods.closedform import ClosedForm

class Mine(ClosedForm):
    def scores(self, queries):
        return queries[:, : self.classes_seen]

    def fit(self, features, queries, labels):
        {body}
"""
TRAINED = """
from coda_prompt.research.methods import Loss
from coda_prompt.research.methods.base import TrainedMethod

class Mine(TrainedMethod):
    def features(self, images{more}):
        return self.backbone.features(images)

    def loss(self, batch):
        per_image = self.head.masked_loss(self.features(batch.images, None), batch.labels)
        return {returned}
"""


PREFIXES = """
import torch
from coda_prompt.research.methods.base import PromptMethod

class Mine(PromptMethod):
    def prefixes(self, queries):
        batch = len(queries)
        return {{0: (torch.zeros(batch, 3, 32), torch.zeros({values}))}}
"""


def bench(tiny: Path, folder: Path, method: str = "mine.py:Mine") -> Any:
    return coda("bench", str(tiny), "--methods", method, "--trials", "1", cwd=folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            CLOSED_FORM.format(body='raise ValueError("singular")'),
            "line 9, in fit: ValueError",
        ),
        (
            CLOSED_FORM.format(body="features @ features"),
            "line 9, in fit: RuntimeError",
        ),
        (
            TRAINED.format(more="", returned="Loss.of(per_image)"),
            "features takes (self, images)",
        ),
        (
            TRAINED.format(more=", queries", returned="per_image"),
            "loss returns Tensor, not Loss",
        ),
        (
            TRAINED.format(more=", queries", returned="Loss.of(per_image[:, None])"),
            "loss returns mean as a tensor of shape (8, 1), expected a tensor of shape (8)",
        ),
        (
            TRAINED.replace("features(images)", "features(images)[:, None]").format(
                more=", queries", returned="Loss.of(per_image)"
            ),
            "features returns a tensor of shape (8, 1, 32), expected a tensor of shape (8, 32)",
        ),
        (
            CLOSED_FORM.replace(": self.classes_seen", ":1").format(body="pass"),
            "mine.py:Mine' cannot be used as a method: scores returns a tensor of shape (6, 1), "
            "expected a tensor of shape (6, 2)",
        ),
        (
            TRAINED.format(
                more=", queries", returned="Loss.of(per_image)\n    def end_task(self): pass"
            ),
            "end_task must call super().end_task",
        ),
        (
            PREFIXES.format(values="batch, 2, 32"),
            "prefixes returns for block 0 keys (8, 3, 32) and values (8, 2, 32), expected the "
            "same shape",
        ),
        (PREFIXES.replace("{{0:", "{{99:").format(values="batch, 3, 32"), "for block 99"),
        ("import sys; sys.exit(3)", "cannot be loaded"),
        ("class Mine: pass", "'Mine' does not inherit from coda_prompt.research.methods.Method"),
        ("Mine = 3", "there is no class 'Mine' in"),
    ],
)
def test_an_error_in_a_method_is_one_message(
    content: str, message: str, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(content)
    failed = bench(tiny, tmp_path)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_an_error_of_the_package_keeps_its_traceback(tiny: Path, tmp_path: Path) -> None:
    call = "from coda_prompt.images.preprocessing import required_min_side as f; f(None)"
    (tmp_path / "mine.py").write_text(CLOSED_FORM.format(body=call))
    failed = bench(tiny, tmp_path)
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr
    assert "in required_min_side" in failed.stderr
    method = methods.find(f"{tmp_path}/mine.py:Mine")  # while its file is loaded
    with pytest.raises(AttributeError) as raised:
        delattr(method, "undefined")
    assert _error_in_method(raised.value) is None


def test_a_class_that_lacks_a_member_gets_one_message(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "from coda_prompt.research.methods import Method\nclass Half(Method):\n    pass\n"
    )
    refused = bench(tiny, tmp_path, "half.py:Half")
    assert refused.returncode == 2
    assert "half.py:Half" in refused.stderr
    assert refused.stderr.count("has no method") == 1
    for member in ("features(self, images, queries)", "logits(self, images", "loss(self, batch)"):
        assert member in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


def test_a_closed_form_needs_no_loss_and_a_trained_method_does() -> None:
    class Fitted(methods.Method):
        closed_form = True

        def logits(self, images: object, queries: object = None) -> Any: ...
        def features(self, images: object, queries: object) -> Any: ...

    class Trained(Fitted):
        closed_form = False

    assert methods.contract_problem(Fitted) is None
    assert "no method loss" in str(methods.contract_problem(Trained))


def test_closed_form_methods_need_scores_and_fit_only() -> None:
    class Mine(ClosedForm):
        def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
            pass

        def scores(self, queries: Tensor) -> Tensor:
            return queries

    assert methods.contract_problem(Mine) is None


def test_a_method_takes_a_backbone_and_its_options() -> None:
    class Mine(NearestClassMean):
        def __init__(self, backbone: ViT) -> None:
            super().__init__(backbone, MethodConfig())

    assert "(self, backbone, config)" in str(methods.contract_problem(Mine))


def test_a_benchmark_with_a_changed_file_is_not_resumed(
    tiny: Path, tmp_path: Path, method: str
) -> None:
    bench = ("bench", str(tiny), "--methods", "mine.py:Mine", "--trials", "1", "--out", "runs")
    finished = coda(*bench, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    (tmp_path / "mine.py").write_text(MINE + "\n# changed")
    refused = coda(*bench, cwd=tmp_path)
    assert refused.returncode == 2
    assert "method_file" in refused.stderr


def test_example_of_the_guide_learns_a_stream(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "guide" / "add-a-method.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
    file = tmp_path / "mine.py"
    file.write_text(code)
    method = methods.make(f"{file}:Mine", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=5, batch_size=8, learning_rate=1e-2))
    result = engine.run(method, make_stream(patterns(classes=6, train=10), tasks=2))
    assert method.prompts.frozen.shape[1] == 2
    assert result.own_classes[1].mean() > 1 / 2  # chance is 1/3


def test_features_of_a_closed_form_on_prompts_may_be_wider_than_the_head(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WIDER)
    options = {"features": "tokens", "ridge": "relative", "width": 32, "last_blocks": 1}
    mine = methods.make(f"{tmp_path}/mine.py:Mine", tiny_vit(), **options)
    stream = make_stream(patterns(classes=4, train=4), tasks=2)
    Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=4)).run(mine, stream)
    assert mine.statistics.projected == 32 + 3 * tiny_vit().config.width
