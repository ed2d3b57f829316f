"""Models made with a method from a user's file, `file.py:Class`."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import assert_same, drawings
from PIL import Image
from serving import files, served, teach, wait_for_job
from small import PLAIN_VIEWS, coda, patterns, tiny_vit
from test_models import changed
from torch import Tensor

from coda_prompt import ContinualClassifier
from coda_prompt.cli import _error_in_method
from coda_prompt.errors import BadMethod, BadOption, CodaError, HashMismatch
from coda_prompt.learner import store
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
        return {{0: (torch.zeros(batch, 3, 128), torch.zeros({values}))}}
"""


def write_drawings(folder: Path) -> None:
    for number, (image, name) in enumerate(zip(*drawings(range(2), 6), strict=True)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image)).save(folder / name / f"{number}.png")


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
            "loss returns mean as a tensor of shape (10, 1), expected a tensor of shape (10)",
        ),
        (
            TRAINED.replace("features(images)", "features(images)[:, None]").format(
                more=", queries", returned="Loss.of(per_image)"
            ),
            "features returns a tensor of shape (10, 1, 128), expected a tensor of shape (10, 128)",
        ),
        (
            CLOSED_FORM.replace(": self.classes_seen", ":1").format(body="pass"),
            "mine.py:Mine' cannot be used as a method: scores returns a tensor of shape (2, 1), "
            "expected a tensor of shape (2, 2)",
        ),
        (
            TRAINED.format(
                more=", queries", returned="Loss.of(per_image)\n    def end_task(self): pass"
            ),
            "end_task must call super().end_task",
        ),
        (
            PREFIXES.format(values="batch, 2, 128"),
            "prefixes returns for block 0 keys (10, 3, 128) and values (10, 2, 128), expected the "
            "same shape",
        ),
        (PREFIXES.replace("{{0:", "{{99:").format(values="batch, 3, 128"), "for block 99"),
        ("import sys; sys.exit(3)", "cannot be loaded"),
        ("class Mine: pass", "'Mine' does not inherit from coda_prompt.research.methods.Method"),
        ("Mine = 3", "there is no class 'Mine' in"),
    ],
)
def test_an_error_in_a_method_is_one_message(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    write_drawings(tmp_path / "data")
    arguments = ("learn", f"{tmp_path}/model", f"{tmp_path}/data", "--backbone", "pocket")
    failed = coda(*arguments, "--method", f"{tmp_path}/mine.py:Mine")
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_an_error_of_the_package_keeps_its_traceback(tmp_path: Path) -> None:
    call = "from coda_prompt.images.preprocessing import required_min_side as f; f(None)"
    (tmp_path / "mine.py").write_text(CLOSED_FORM.format(body=call))
    write_drawings(tmp_path / "data")
    arguments = ("learn", f"{tmp_path}/model", f"{tmp_path}/data", "--backbone", "pocket")
    failed = coda(*arguments, "--method", f"{tmp_path}/mine.py:Mine")
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr
    assert "in required_min_side" in failed.stderr
    method = methods.find(f"{tmp_path}/mine.py:Mine")  # while its file is loaded
    with pytest.raises(AttributeError) as raised:
        delattr(method, "undefined")
    assert _error_in_method(raised.value) is None


FAILS_LATER = """
from coda_prompt.research.methods import Loss
from coda_prompt.research.methods.base import TrainedMethod

class Mine(TrainedMethod):
    steps = 0

    def features(self, images, queries):
        return self.backbone.features(images)

    def loss(self, batch):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("third step")
        return Loss.of(self.head.masked_loss(self.features(batch.images, None), batch.labels))
"""


def test_a_failed_first_lesson_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS_LATER)
    write_drawings(tmp_path / "data")
    (tmp_path / "empty").mkdir()
    for model in ("new", "parent/new", "empty"):
        arguments = ("learn", model, "data", "--backbone", "pocket", "--method", "mine.py:Mine")
        failed = coda(*arguments, cwd=tmp_path)
        assert failed.returncode == 2
        assert "ValueError: third step" in failed.stderr
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "parent").exists()
    assert not list((tmp_path / "empty").iterdir())


@pytest.fixture
def model(tmp_path: Path, method: str) -> Path:
    classifier = ContinualClassifier(method=method)
    classifier.learn(*drawings(range(3), 8))
    classifier.save(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_stores_the_class_and_the_hash_of_the_file(model: Path, method: str) -> None:
    description = store.read_model(model).description
    assert description.method == "Mine"
    assert description.method_sha256 is not None
    assert len(description.method_sha256) == 64
    loaded = ContinualClassifier.load(model, method=method)
    loaded.learn(*drawings([3, 4], 8))
    loaded.save(model)
    assert_same(ContinualClassifier.from_pretrained(model, method=method), loaded)


def test_a_moved_file_is_still_the_same_method(model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "mine.py", tmp_path / "elsewhere" / "renamed.py")
    loaded = ContinualClassifier.load(model, method=f"{tmp_path}/elsewhere/renamed.py:Mine")
    assert len(loaded.predict(drawings([0])[0])) == 20


def test_a_model_without_its_file_says_how_to_name_it(model: Path) -> None:
    with pytest.raises(BadOption, match=r"--method path/to/file\.py:CLASS"):
        ContinualClassifier.load(model)
    with pytest.raises(BadOption, match="was made with Mine"):
        ContinualClassifier.load(model, method="ncm")
    with pytest.raises(BadMethod, match="no file"):
        ContinualClassifier.load(model, method="nowhere.py:Mine")


def test_a_changed_file_is_refused_before_it_runs(model: Path, tmp_path: Path, method: str) -> None:
    (tmp_path / "mine.py").write_text(f"{MINE}\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(HashMismatch, match=r"another version of this file.*learn a new model"):
        ContinualClassifier.load(model, method=method)
    assert not (tmp_path / "ran").exists()


def test_nothing_in_a_model_folder_is_run(model: Path, tmp_path: Path) -> None:
    shutil.copy(tmp_path / "mine.py", model / "mine.py")
    with pytest.raises(BadOption, match="no code from there is run"):
        ContinualClassifier.load(model, method=f"{model}/mine.py:Mine")
    trap = tmp_path / "trap.py"
    trap.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    for name in (f"{trap}:Mine", str(trap), "trap:Mine"):
        changed(model, lambda d, name=name: d.update(method=name))  # type: ignore[misc]
        with pytest.raises(CodaError):
            ContinualClassifier.load(model)
        changed(model, lambda d, name=name: d.update(method=name, method_sha256=None))  # type: ignore[misc]
        with pytest.raises(CodaError):
            ContinualClassifier.load(model)
    assert not (tmp_path / "ran").exists()


def test_every_command_takes_the_file(method: str, tmp_path: Path, drawing_folders: Path) -> None:
    named = ("--method", "mine.py:Mine")
    for task in ("task-1", "task-2"):
        learned = coda("learn", "model", str(drawing_folders / task), *named, cwd=tmp_path)
        assert learned.returncode == 0, learned.stderr
    test = str(drawing_folders / "test")
    shown = coda("predict", "model", test, "--csv", *named, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert len(list(csv.DictReader(io.StringIO(shown.stdout)))) > 8
    shown = coda(
        "evaluate", "model", str(drawing_folders / "task-2"), "--json", *named, cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["accuracy"] > 0.3
    shown = coda("export", "model", "model.onnx", *named, cwd=tmp_path)
    assert (tmp_path / "model.onnx").exists(), shown.stderr
    assert "Mine on pocket" in coda("info", "model", cwd=tmp_path).stdout
    for verb in (("predict", "model", test), ("learn", "model", str(drawing_folders / "task-1"))):
        refused = coda(*verb, cwd=tmp_path)
        assert refused.returncode == 2
        assert "--method path/to/file.py:CLASS" in refused.stderr
    (tmp_path / "mine.py").write_text(MINE + "\n# changed")
    refused = coda("predict", "model", test, *named, cwd=tmp_path)
    assert refused.returncode == 2
    assert "another version of this file" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert coda("undo", "model", cwd=tmp_path).returncode == 0


def test_a_class_that_lacks_a_member_gets_one_message(
    tmp_path: Path, drawing_folders: Path
) -> None:
    (tmp_path / "half.py").write_text(
        "from coda_prompt.research.methods import Method\nclass Half(Method):\n    pass\n"
    )
    refused = coda(
        "learn", "model", str(drawing_folders / "task-1"), "--method", "half.py:Half", cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "half.py:Half" in refused.stderr
    assert refused.stderr.count("has no method") == 1
    for member in ("features(self, images, queries)", "logits(self, images", "loss(self, batch)"):
        assert member in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "model").exists()


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


def test_the_service_predicts_and_learns_with_the_method_of_a_file(
    model: Path, method: str
) -> None:
    with served(str(model), "--method", method) as client:
        assert client.get("/v1/model").json()["method"] == "Mine"
        images, labels = drawings([3, 4], 8)
        job = wait_for_job(client, teach(client, images, list(labels)))
        assert job["state"] == "done", job
        answer = client.post("/v1/predict", files=files(images[:1])).json()
        assert answer["predictions"][0]["best"] == labels[0]
    with (
        pytest.raises(AssertionError, match=r"--method path/to/file\.py:CLASS"),
        served(str(model)),
    ):
        pass
