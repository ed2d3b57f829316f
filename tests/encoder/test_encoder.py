"""Encoders in this package: equal to the torch ViT, plain and prompted, each image by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from small import tiny_vit

from coda_prompt.encoder.encoder import Encoder, Prompts, load_encoder
from coda_prompt.encoder.threads import in_threads, usable_cores
from coda_prompt.errors import BadOption
from coda_prompt.images.preprocessing import Preprocessing, Resize, eval_view
from coda_prompt.research.export import export_encoder
from coda_prompt.research.methods.coda import CodaConfig, CodaPrompt
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.research.vit.vit import ViT

DRAWINGS = [Image.fromarray(each) for each in pocket_source(0.0).test.images[::250]]  # type: ignore[attr-defined]
GREY = Preprocessing(16, 1, (0.5,), (0.5,))


def photographs(count: int) -> list[Image.Image]:
    """Shaded blobs, of different sizes and aspect ratios."""
    random = np.random.default_rng(0)
    images = []
    for number in range(count):
        tones = random.uniform(0, 255, (7, 7, 3)).astype(np.uint8)
        size = (150 + 20 * number, 200)
        images.append(Image.fromarray(tones).resize(size, Image.Resampling.BICUBIC))
    return images


IMAGES = {"pocket": DRAWINGS, "photo-vit": photographs(8)}


@pytest.fixture(scope="module", params=IMAGES)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return load_encoder(request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ViT, Encoder]:
    """A ViT, and its encoder in float32."""
    folder, vit = tmp_path_factory.mktemp("tiny"), tiny_vit().requires_grad_(False)
    made_of = {"name": "tiny", "licence": "none", "source": "random"}
    export_encoder(vit, GREY, folder, "encoder", precision="float32", **made_of)
    return vit, load_encoder(str(folder))


def prompted(vit: ViT, count: int) -> tuple[CodaPrompt, Prompts]:
    """CODA-P with a number of random components, and its prompts."""
    method = CodaPrompt(vit, CodaConfig(components=count))
    generator = torch.Generator().manual_seed(count)
    shapes = [bank.frozen.shape[2:] for bank in method.prompt_banks.values()]
    rows = [10 * torch.randn(5, count, *shape, generator=generator) for shape in shapes]
    for bank, values in zip(method.prompt_banks.values(), rows, strict=True):
        bank.append(values)
    return method, Prompts(*(values.numpy() for values in rows))


def view_of(image: Image.Image, preprocessing: Preprocessing) -> torch.Tensor:
    resize: Resize = "squash" if preprocessing.channels == 1 else "crop"
    return torch.from_numpy(eval_view(image, preprocessing, resize))[None]


def unit(features: torch.Tensor) -> torch.Tensor:
    return features[0] / features[0].norm()


def cosine(first: NDArray[np.float32], second: torch.Tensor) -> float:
    return torch.cosine_similarity(torch.from_numpy(first), second.flatten(), dim=0).item()


def test_shipped_graphs_agree_with_the_torch_vit(encoder: Encoder) -> None:
    backbone = load_backbone(encoder.name)
    for image in IMAGES[encoder.name]:
        view = view_of(image, backbone.preprocessing)
        encoded = encoder.encode(image)
        assert encoded.features.shape == (encoder.width,)
        assert np.linalg.norm(encoded.features) == pytest.approx(1)
        assert np.array_equal(encoded.plain[: encoder.width], encoded.features)
        assert encoded.plain.shape == (encoder.plain_width,)
        assert cosine(encoded.features, backbone.vit.features(view)) > 0.99


def test_shipped_prompted_graphs_agree_with_coda_prompt(encoder: Encoder) -> None:
    backbone = load_backbone(encoder.name)
    image = IMAGES[encoder.name][0]
    view, plain = view_of(image, backbone.preprocessing), encoder.encode(image)
    for count in (7, 30):
        method, prompts = prompted(backbone.vit, count)
        encoded = encoder.encode(image, prompts)
        expected = method.features(view, None)
        error = 1 - cosine(encoded.features, expected)
        assert error < min(0.01, (1 - cosine(plain.features, expected)) / 3)
        assert np.linalg.norm(encoded.features) == pytest.approx(1)
        assert np.allclose(encoded.plain, plain.plain, atol=1e-5)


def test_graphs_in_float32_equal_the_torch_vit(tiny: tuple[ViT, Encoder]) -> None:
    vit, encoder = tiny
    for image in DRAWINGS[:3]:
        view, encoded = view_of(image, GREY), encoder.encode(image)
        assert np.allclose(encoded.features, unit(vit.features(view)), atol=1e-4)
        for count in (1, 2, 50):
            method, prompts = prompted(vit, count)
            features = encoder.encode(image, prompts).features
            assert np.allclose(features, unit(method.features(view, None)), atol=1e-4)


def test_an_answer_depends_on_no_other_image_and_no_thread(encoder: Encoder) -> None:
    images = IMAGES[encoder.name]
    alone = [encoder.encode(image).features for image in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(encoder.encode, [*images, *reversed(images)]))
    for encoded, expected in zip(together, [*alone, *reversed(alone)], strict=True):
        assert np.array_equal(encoded.features, expected)


def test_prompts_of_another_shape_are_refused(tiny: tuple[ViT, Encoder]) -> None:
    vit, encoder = tiny
    _, prompts = prompted(vit, 3)
    assert encoder.prompt_shape == (5, 8, 32)
    for wrong in (
        Prompts(prompts.components[:, :2], prompts.keys, prompts.attention),
        Prompts(prompts.components, prompts.keys[..., :31], prompts.attention),
        Prompts(prompts.components[:, :0], prompts.keys[:, :0], prompts.attention[:, :0]),
        Prompts(prompts.components, prompts.keys[0], prompts.attention),
    ):
        with pytest.raises(BadOption, match="does not fit encoder 'tiny'"):
            encoder.encode(DRAWINGS[0], wrong)


def test_only_pocket_has_a_prior_and_only_for_its_own_weights() -> None:
    prior = load_encoder("pocket").prior()
    assert prior is not None
    assert len(prior["class_means"]) == 245
    assert prior["covariance"].shape == (prior["class_means"].shape[1],) * 2
    assert load_encoder("photo-vit").prior() is None


def test_an_encoder_is_used_without_torch() -> None:
    program = (
        "import sys; from PIL import Image; from coda_prompt.encoder.encoder import load_encoder; "
        "e = load_encoder('pocket'); e.encode(Image.new('L', (30, 40))); e.prior(); "
        "sys.exit(bool({'torch', 'onnx', 'huggingface_hub'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_results_of_threads_come_in_order_and_read_ahead_is_bounded() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = in_threads(lambda number: number * 2, items())
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    assert len(taken) <= 3 + 2 * usable_cores()
    assert list(results) == list(range(6, 200, 2))


def test_an_exception_is_raised_at_its_place() -> None:
    results = in_threads(lambda number: 1 // number, [2, 1, 0, 1])
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_closing_the_iterator_stops_the_work() -> None:
    done: list[int] = []
    results = in_threads(done.append, range(1000), ahead=4)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(done) <= 1 + 4 * usable_cores()


def test_threads_are_limited_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert usable_cores() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert usable_cores() >= 1


def test_photo_has_the_features_of_both_networks_side_by_side() -> None:
    both, vit, cnn = (load_encoder(name) for name in ("photo", "photo-vit", "photo-lite"))
    assert (both.width, both.prompt_shape) == (vit.width + cnn.width, None)
    assert len({each.fingerprint for each in (both, vit, cnn)}) == 3
    for image in IMAGES["photo-vit"][:2]:
        parts = [each.encode(image).features for each in (vit, cnn)]
        expected = np.concatenate(parts) / 2**0.5
        assert np.allclose(both.encode(image).features, expected, atol=1e-6)
