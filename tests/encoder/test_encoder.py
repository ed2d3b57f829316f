"""Encoders as ONNX graphs: equal to the torch ViT, plain and prompted, each image by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from coda_prompt.encoder.encoder import Encoder, load_encoder
from coda_prompt.images.preprocessing import eval_view
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.vit.catalog import load_backbone

DRAWINGS = pocket_source(0.0).test.images[::400]


def photographs(count: int) -> list[Image.Image]:
    """Shaded blobs of different sizes and aspect ratios."""
    random = np.random.default_rng(0)
    images = []
    for number in range(count):
        tones = random.uniform(0, 255, (7, 7, 3)).astype(np.uint8)
        size = (150 + 20 * number, 200)
        images.append(Image.fromarray(tones).resize(size, Image.Resampling.BICUBIC))
    return images


IMAGES = {"pocket": [Image.fromarray(each) for each in DRAWINGS], "photo-vit": photographs(8)}


@pytest.fixture(scope="module", params=["pocket", "photo-vit"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return load_encoder(request.param)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def test_shipped_graphs_agree_with_the_torch_vit(encoder: Encoder) -> None:
    backbone = load_backbone(encoder.name.replace("photo-vit", "photo"))
    for image in IMAGES[encoder.name]:
        view = torch.from_numpy(eval_view(image, backbone.preprocessing))[None]
        features, tokens = backbone.vit.features(view)[0], backbone.vit.plain_tokens(view)[0]
        encoded = encoder.encode(image)
        assert cosine(encoded.features, features.numpy()) > 0.99
        assert cosine(encoded.tokens, tokens.numpy()) > 0.99
        assert encoded.features.shape == (encoder.width,)
        assert encoded.tokens.shape == (encoder.token_width,)
