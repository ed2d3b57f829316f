"""The two networks of `pretrain_pocket.py`: a residual teacher and the ViT student.

Using the backbone needs neither: `fold` turns the student into a plain ViT of the package.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from coda_prompt.research.vit.vit import ConvStem, ViT, ViTConfig

VIT = ViTConfig(
    image_size=28,
    patch_size=4,
    channels=1,
    width=128,
    depth=6,
    heads=4,
    mlp_width=512,
    stem=(48,),
)


class NormedConv(nn.Module):
    """A convolution of the stem with the BatchNorm it is trained with."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(conv.out_channels)

    def forward(self, maps: Tensor) -> Tensor:
        return self.norm(self.conv(maps))


def conv_stem(vit: ViT) -> ConvStem:
    """Return the convolutional stem of the pocket ViT."""
    if not isinstance(vit.patch_embed, ConvStem):
        raise TypeError("the ViT has no convolutional stem; create it with VIT")
    return vit.patch_embed


class Student(nn.Module):
    """The ViT with BatchNorm in its stem, a classifier, and a projection to teacher features."""

    def __init__(self, classes: int, teacher_width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.vit = ViT(VIT).initialise(generator)
        stem = conv_stem(self.vit)
        stem.convs = nn.ModuleList(NormedConv(cast(nn.Conv2d, conv)) for conv in stem.convs)
        self.head = nn.Linear(VIT.width, classes)
        self.to_teacher = nn.Linear(VIT.width, teacher_width) if teacher_width else None

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return class-token features and logits."""
        features = self.vit(images)
        return features, self.head(features)


class Residual(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.body(maps) + self.shortcut(maps))


class Teacher(nn.Module):
    """A small residual network; on 24 500 drawings it learns faster than a ViT."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (48, 96, 192)) -> None:
        super().__init__()
        first = widths[0]
        self.width = widths[-1]
        layers: list[nn.Module] = [
            nn.Conv2d(1, first // 2, 3, padding=1, bias=False),
            nn.BatchNorm2d(first // 2),
            nn.ReLU(),
        ]
        before = first // 2
        for width in widths:
            layers += [Residual(before, width, stride=2), Residual(width, width, stride=1)]
            before = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(self.width, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return pooled features and logits."""
        maps = self.body(images.contiguous(memory_format=torch.channels_last))
        features = maps.mean((2, 3))
        return features, self.head(features)


def fold(student: Student) -> ViT:
    """Return a plain ViT that computes the same as `student.vit` in evaluation mode."""
    weights = {
        name: tensor
        for name, tensor in student.vit.state_dict().items()
        if not name.startswith("patch_embed.")
    }
    for index, conv in enumerate(conv_stem(student.vit).convs):
        trained = cast(NormedConv, conv)
        fused = fuse_conv_bn_eval(trained.conv, trained.norm)
        for name, tensor in fused.state_dict().items():
            weights[f"patch_embed.convs.{index}.{name}"] = tensor
    vit = ViT(VIT)
    vit.load_state_dict({name: tensor.detach() for name, tensor in weights.items()})
    return vit.eval()
