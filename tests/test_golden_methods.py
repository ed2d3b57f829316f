"""Numbers of the released code of methods, reproduced; golden/README.md."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file
from small import PLAIN_VIEWS, brief
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from coda_prompt.research import methods
from coda_prompt.research.methods import TrainingBatch
from coda_prompt.research.methods.adapters import AdapterMethod
from coda_prompt.research.methods.ease import EASE
from coda_prompt.research.methods.gaussians import Gaussians
from coda_prompt.research.methods.hide import HiDePrompt
from coda_prompt.research.methods.inflora import directions_to_protect
from coda_prompt.research.methods.slca import SLCA
from coda_prompt.research.methods.tuna import TUNA
from coda_prompt.research.methods.vqprompt import VQPrompt
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.schedule import learning_rate
from coda_prompt.research.vit.vit import Attention, ViT, ViTConfig

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
KINDS = ("down", "down_bias", "up", "up_bias")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def released() -> Tensors:
    return load_file(GOLDEN / "methods.safetensors")


@pytest.fixture
def vit(golden_tensors: Tensors) -> ViT:
    vit = ViT(ViTConfig(32, 8, 3, 32, 6, 4, 128))
    names = [name for name in golden_tensors if name.startswith("vit.")]
    vit.load_state_dict({name.removeprefix("vit."): golden_tensors[name] for name in names})
    return vit


def set_adapters(method: AdapterMethod, released: Tensors, prefix: str, task: int) -> None:
    """Put the adapters of the released code where training would have left them."""
    for kind, bank in zip(KINDS, method.adapters.banks, strict=True):
        assert bank.trainable is not None
        bank.trainable.data[:, 0] = released[f"{prefix}.adapters.{kind}"][:, task]


# -- SLCA


def test_slca_gaussians_equal_the_released_code(released: Tensors) -> None:
    features = released["slca.features"]  # classes x images x D
    gaussians = Gaussians(6, "full", jitter=1e-4)
    gaussians.grow(6)
    labels = torch.arange(6).repeat_interleave(features.shape[1])
    gaussians.update(features.flatten(0, 1), labels)
    assert_close(gaussians.means.rows[:, 0], released["slca.means"], **TOLERANCE)
    factors = gaussians.factors.rows[:, 0]
    assert_close(factors @ factors.mT, released["slca.covariances"], **TOLERANCE)


def test_slca_alignment_equals_the_released_code(released: Tensors) -> None:
    """All steps of an alignment: loss, SGD with momentum and decay, cosine per epoch."""
    vit = ViT(ViTConfig(8, 4, 3, 6, 1, 1, 8))
    method = methods.make("slca", vit, align_epochs=2)
    assert isinstance(method, SLCA)
    for _ in range(3):
        if method.in_task:
            method.end_task()
        method.begin_task(brief(method, new=2))
    start = (released["slca.start.weight"], released["slca.start.bias"])
    method.aligned.start(torch.arange(6), *start)
    (stage,) = [stage for stage in method.stages() if stage.data == "generated"]
    optimizer = Engine(PLAIN_VIEWS)._optimizer(method, stage, stage.groups)
    assert stage.schedule is not None
    steps = zip(released["slca.batches"], released["slca.labels"], strict=True)
    for step, (features, labels) in enumerate(steps):
        rate = learning_rate(stage.schedule, 0.01, step // 6, 2)
        optimizer.param_groups[0]["lr"] = rate
        loss = method.loss(TrainingBatch(None, labels, features=features, stage="align"))
        assert_close(loss.mean.mean(), released["slca.losses"][step], **TOLERANCE)
        optimizer.zero_grad()
        loss.mean.mean().backward()
        optimizer.step()
    assert_close(method.aligned.weight.rows, released["slca.end.weight"], **TOLERANCE)
    assert_close(method.aligned.bias.rows, released["slca.end.bias"], **TOLERANCE)


# -- EASE


def ease(vit: ViT, released: Tensors, preset: str, finish: bool = True) -> EASE:
    method = methods.make("ease", vit, rank=4, preset=preset)
    assert isinstance(method, EASE)
    for task in range(3):
        method.begin_task(brief(method, new=2))
        set_adapters(method, released, "ease", task)
        images, labels = released[f"ease.task{task}.images"], released[f"ease.task{task}.labels"]
        with torch.no_grad():
            method.fit(method.features(images, None), None, labels)
        if finish or task < 2:
            method.end_task()
    return method


@pytest.mark.parametrize(("preset", "name"), [("release", "recalc"), ("paper", "once")])
def test_ease_inference_equals_the_released_code(
    vit: ViT, released: Tensors, preset: str, name: str
) -> None:
    method, images = ease(vit, released, preset), released["ease.images"]
    assert_close(method.features(images, None), released["ease.features"], **TOLERANCE)
    found = method.prototypes()[0].flatten(1)
    assert_close(found, released[f"ease.{name}.prototypes"], **TOLERANCE)
    assert_close(method.logits(images), released[f"ease.{name}.logits"], **TOLERANCE)


def test_ease_training_equals_the_released_code(vit: ViT, released: Tensors) -> None:
    method = ease(vit, released, "release", finish=False)
    assert method.proxies.trainable is not None
    assert method.sigma.trainable is not None
    method.proxies.trainable.data.copy_(released["ease.train.proxies"])
    method.sigma.trainable.data.copy_(released["ease.train.sigma"])
    labels = torch.tensor([4, 5, 5, 4])
    loss = method.loss(TrainingBatch(released["ease.images"], labels)).mean.mean()
    assert_close(loss, released["ease.train.loss"], **TOLERANCE)
    loss.backward()
    up, down = method.adapters.up.trainable, method.adapters.down.trainable
    assert up is not None
    assert down is not None
    assert_close(up.grad[:, 0], released["ease.train.up.grad"], **TOLERANCE)
    assert_close(down.grad[:, 0], released["ease.train.down.grad"], **TOLERANCE)
    assert_close(method.proxies.trainable.grad, released["ease.train.proxies.grad"], **TOLERANCE)
    assert_close(method.sigma.trainable.grad, released["ease.train.sigma.grad"], **TOLERANCE)


# -- TUNA


def test_tuna_inference_equals_the_released_code(vit: ViT, released: Tensors) -> None:
    method = methods.make("tuna", vit, universal="newest")
    assert isinstance(method, TUNA)
    for task, new in enumerate((2, 3, 2)):
        method.begin_task(brief(method, new=new))
        set_adapters(method, released, "tuna", task)
        method.end_task()
    method.aligned.weight.frozen = released["tuna.head"]
    images = released["tuna.images"]
    assert_close(method.all_adapted(images), released["tuna.features"], **TOLERANCE)
    for kind, merged in zip(KINDS, method.adapters.merged(), strict=True):
        assert torch.equal(merged, released[f"tuna.merged.{kind}"])
    ranking = method.logits(images).argsort(dim=1, descending=True)
    assert torch.equal(ranking, released["tuna.ranking"])


def test_tuna_losses_equal_the_released_code(released: Tensors) -> None:
    scores, labels = released["tuna.cosface.scores"], released["tuna.cosface.labels"]
    loss = torch.nn.functional.cross_entropy(20 * scores, labels)
    assert_close(loss, released["tuna.cosface.loss"], **TOLERANCE)
    up = released["tuna.orthogonality.up"]  # blocks x sets x D x rank
    vit = ViT(ViTConfig(8, 4, 3, 8, 12, 2, 8))
    method = methods.make("tuna", vit, rank=4, orthogonality=math.exp(3))
    assert isinstance(method, TUNA)
    for task in range(3):
        method.begin_task(brief(method, new=2))
        assert method.adapters.up.trainable is not None
        method.adapters.up.trainable.data[:, 0] = up[:, task]
        if task < 2:
            method.end_task()
    assert_close(method.penalty(), released["tuna.orthogonality.loss"], **TOLERANCE)


# -- VQ-Prompt


def test_vq_prefixes_losses_and_gradients(vit: ViT, released: Tensors) -> None:
    method = methods.make("vq-prompt", vit)
    assert isinstance(method, VQPrompt)
    method.begin_task(brief(method, new=2))
    prompts, keys = method.prompts.trainable, method.keys.trainable
    assert prompts is not None
    assert keys is not None
    prompts.data.copy_(released["vq.prompts"])
    keys.data.copy_(released["vq.keys"])
    queries = released["vq.queries"]
    mixture, nearest = method.quantised(queries)
    found = torch.stack([torch.cat(pair, dim=1) for pair in method.prefixes(queries).values()])
    assert_close(found, released["vq.prefixes"], **TOLERANCE)
    losses = method.quantisation_loss(mixture, nearest).mean(1)
    assert_close(losses, released["vq.losses"], **TOLERANCE)
    total = losses.sum() + (found * released["vq.weights"]).mean(dim=(1, 2, 3)).sum()
    total.backward()
    assert_close(prompts.grad, released["vq.prompts.grad"], **TOLERANCE)
    assert_close(keys.grad, released["vq.keys.grad"], **TOLERANCE)


# -- HiDe-Prompt


def test_hide_prompt_of_the_third_task(vit: ViT, released: Tensors) -> None:
    method = methods.make("hide-prompt", vit, length=6)
    assert isinstance(method, HiDePrompt)
    prompts = released["hide.prompts"].transpose(1, 2).flatten(2, 3)  # blocks x tasks x 2L x D
    for task in range(3):
        method.begin_task(brief(method, new=2))
        assert method.prompts.trainable is not None
        method.prompts.trainable.data[:, 0] = prompts[:, task]
        if task < 2:
            method.end_task()
    expected = released["hide.mixed"].flatten(2, 3)  # blocks x 1 x 2L x D
    assert_close(method.mixed_prompt(), expected, **TOLERANCE)


def test_hide_task_classifier_equals_the_released_code(vit: ViT, released: Tensors) -> None:
    method = methods.make("hide-prompt", vit)
    assert isinstance(method, HiDePrompt)
    names = ("net.0.0.weight", "net.0.0.bias", "net.1.0.weight", "net.1.0.bias")
    for name, bank in zip((*names, "norm.weight", "norm.bias"), method.tasks.mlp, strict=True):
        bank.append(released[f"hide.mlp.{name}"])
    found = method.tasks(released["hide.mlp.input"])
    assert_close(found, released["hide.mlp.output"], **TOLERANCE)


def test_hide_contrastive_loss_equals_the_released_code(vit: ViT, released: Tensors) -> None:
    method = methods.make("hide-prompt", vit, centroids=2)
    assert isinstance(method, HiDePrompt)
    method.begin_task(brief(method, new=2))
    method.end_task()
    method.aligned.gaussians.means.frozen = released["hide.contrast.centroids"]
    method.begin_task(brief(method, new=2))
    features = released["hide.contrast.features"].clone().requires_grad_()
    loss = method.config.contrast * method.contrastive_loss(features)
    assert_close(loss, released["hide.contrast.loss"], **TOLERANCE)
    loss.backward()
    assert_close(features.grad, released["hide.contrast.grad"], **TOLERANCE)


# -- SD-LoRA, InfLoRA and LoRanPAC


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return load_file(GOLDEN / "lowrank.safetensors")


def part(golden: Tensors, prefix: str) -> SimpleNamespace:
    """The tensors below a prefix, as `of("name")`."""
    return SimpleNamespace(of=lambda name: golden[f"{prefix}.{name}"])


def test_sdlora_projections_and_gradients_in_the_third_task(golden: Tensors) -> None:
    released = part(golden, "sdlora")
    down, up = released.of("down"), released.of("up").mT  # tasks x blocks x (q, v) x rank x D
    vit = ViT(ViTConfig(8, 4, 3, width=12, depth=2, heads=2, mlp_width=8))
    method = methods.make("sd-lora", vit, rank=3)
    for task in range(3):
        method.begin_task(brief(method, new=2))
        with torch.no_grad():
            for index, target in enumerate(("q", "v")):
                method.directions.down[target].trainable.copy_(down[task, :, index])
                method.directions.up[target].trainable.copy_(up[task, :, index])
        if task < 2:
            method.end_task()
    method.magnitudes.trainable.data.copy_(released.of("magnitudes"))
    edits, inputs = method.edits(), released.of("inputs")
    for block in range(2):
        plain = F.linear(
            inputs, released.of(f"{block}.qkv.weight"), released.of(f"{block}.qkv.bias")
        )
        query, key, value = plain.chunk(3, dim=-1)
        deltas = edits[block].deltas
        outputs = torch.cat([query + deltas["q"](inputs), key, value + deltas["v"](inputs)], dim=-1)
        assert_close(outputs, released.of(f"{block}.outputs"), **TOLERANCE)
        method.zero_grad()
        (outputs * released.of("probe")).sum().backward(retain_graph=True)
        for target in ("q", "v"):
            down_gradient = method.directions.down[target].trainable.grad[block]
            up_gradient = method.directions.up[target].trainable.grad[block]
            assert_close(down_gradient, released.of(f"{block}.{target}.down.grad"), **TOLERANCE)
            assert_close(up_gradient.T, released.of(f"{block}.{target}.up.grad"), **TOLERANCE)
        assert_close(
            method.magnitudes.trainable.grad, released.of(f"{block}.magnitudes.grad"), **TOLERANCE
        )


def test_inflora_directions_over_nine_tasks(golden: Tensors) -> None:
    """Also after the released code has replaced its basis by the orthogonal complement."""
    width, tasks = 16, 9
    old = torch.zeros(0, width, dtype=torch.float64)
    for task in range(tasks):
        released = part(golden, f"inflora.{task}")
        rows = released.of("inputs").flatten(0, 1).double()
        moment = rows.T @ rows / len(rows)
        assert_close(moment.float(), released.of("moment"), **TOLERANCE)
        free = moment - old.T @ old @ moment
        leading = torch.linalg.svd(free).U[:, :3]
        down = released.of("down").double()
        assert_close(down.T @ down, leading @ leading.T / 3, **TOLERANCE)
        old = torch.cat([old, directions_to_protect(moment, old, 0.6 + 0.4 * task / tasks)])
        assert_close((old.T @ old).float(), released.of("protected"), **TOLERANCE)
    assert len(old) > width / 2


def test_inflora_attention_with_all_components(golden: Tensors) -> None:
    released = part(golden, "inflora")
    vit = ViT(ViTConfig(8, 4, 3, width=16, depth=1, heads=2, mlp_width=8))
    attention: Attention = vit.blocks[0].attn  # type: ignore[assignment]
    for layer in ("qkv", "proj"):
        getattr(attention, layer).weight.data = released.of(f"{layer}.weight")
        getattr(attention, layer).bias.data = released.of(f"{layer}.bias")
    method = methods.make("inflora", vit, rank=3)
    for task in range(9):
        method.begin_task(brief(method, new=2))
        down, up_k, up_v = (released.of(f"{task}.{name}") for name in ("down", "up.k", "up.v"))
        method.delta.down["shared"].frozen[0, -3:] = down
        with torch.no_grad():
            method.delta.up["k"].trainable.copy_(up_k.T[None])
            method.delta.up["v"].trainable.copy_(up_v.T[None])
        inputs, deltas = released.of(f"{task}.inputs"), method.edits()[0].deltas
        query, key, value = attention.qkv(inputs).chunk(3, dim=-1)
        projected = (query, key + deltas["k"](inputs), value + deltas["v"](inputs))
        assert_close(attention(*projected, None), released.of(f"{task}.outputs"), **TOLERANCE)
        method.end_task()


@pytest.mark.parametrize(("form", "features", "tasks"), [("wide", 60, 2), ("tall", 20, 3)])
def test_loranpac_values_and_scores(golden: Tensors, form: str, features: int, tasks: int) -> None:
    """With fewer images than random features, and with more."""
    released = part(golden, f"loranpac.{form}")
    vit = ViT(ViTConfig(8, 4, 3, width=6, depth=1, heads=2, mlp_width=8))
    method = methods.make("loranpac", vit, width=features)
    for task in range(tasks):
        method.begin_task(brief(method, new=3))
        projection = released.of("projection")
        method.statistics._projection = (int(method.statistics.seed), projection)
        method.fit(released.of(f"{task}.features"), None, released.of(f"{task}.labels"))
        method.end_task()
        values = method.statistics.spectrum.frozen.norm(dim=1)
        assert_close(values, released.of(f"{task}.values"), **TOLERANCE)
        scores = method.scores(released.of("test"))
        assert_close(scores, released.of(f"{task}.logits"), **TOLERANCE)
