"""A Vision Transformer as slow loops: the oracle of the real one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from coda_prompt.research.vit.vit import Prefix, ViT, ViTConfig

NaivePrefixes = Mapping[int, Prefix | Callable[[Tensor], Prefix]]
"""Keys and values of blocks, or a function of the class token that enters the block."""


def random_vit(config: ViTConfig, seed: int = 0) -> ViT:
    """A ViT in which every parameter matters: none is left at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    vit = ViT(config)
    for name, parameter in vit.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
        centre = 1.0 if name.endswith(("norm1.weight", "norm2.weight", "norm.weight")) else 0.0
        parameter.data = centre + scale * noise
    return vit.requires_grad_(False).eval()


def naive_features(
    vit: ViT,
    images: Tensor,
    prefixes: NaivePrefixes | None = None,
    changes: Mapping[tuple[int, str], Tensor] | None = None,
    adapter: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """All tokens through all blocks, one image, head and query at a time.

    `changes` are added to the weights of queries, keys and values: (block, "q") -> D x D;
    `adapter` is what is added to one token after the attention of a block.
    """
    config, weights = vit.config, vit.state_dict(keep_vars=True)

    def norm(tokens: Tensor, name: str) -> Tensor:
        mean = tokens.mean(dim=-1, keepdim=True)
        variance = (tokens - mean).square().mean(dim=-1, keepdim=True)
        unit = (tokens - mean) / torch.sqrt(variance + config.norm_eps)
        return unit * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(tokens: Tensor, name: str) -> Tensor:
        return tokens @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def gelu(values: Tensor) -> Tensor:
        return values * 0.5 * (1 + torch.erf(values / math.sqrt(2)))

    def scaled(tokens: Tensor, name: str) -> Tensor:
        return tokens * weights[f"{name}.gamma"] if config.layer_scale else tokens

    def attend(tokens: Tensor, block: int, image: int, class_token: Tensor) -> Tensor:
        query, key, value = (
            rows + tokens @ changes[block, name].T if changes and (block, name) in changes else rows
            for name, rows in zip(
                "qkv",
                linear(tokens, f"blocks.{block}.attn.qkv").split(config.width, dim=-1),
                strict=True,
            )
        )
        if prefixes is not None and block in prefixes:
            prefix = prefixes[block]
            pair = prefix(class_token) if callable(prefix) else [rows[image] for rows in prefix]
            key, value = torch.cat([pair[0], key]), torch.cat([pair[1], value])
        channels = config.width // config.heads
        rows = []
        for token in range(len(tokens)):
            heads = []
            for head in range(config.heads):
                own = slice(head * channels, (head + 1) * channels)
                scores = torch.stack([query[token, own] @ row[own] for row in key])
                exponentials = torch.exp(scores / math.sqrt(channels))
                shares = exponentials / exponentials.sum()
                heads.append(
                    sum(
                        (share * row[own] for share, row in zip(shares, value, strict=True)),
                        torch.zeros(channels),
                    )
                )
            rows.append(torch.cat(heads))
        return linear(torch.stack(rows), f"blocks.{block}.attn.proj")

    def patches(image: Tensor) -> Tensor:
        if config.stem:
            maps = image[None]
            for index in range(len(config.stem) + 1):
                name = f"patch_embed.convs.{index}"
                maps = gelu(maps) if index else maps
                maps = torch.nn.functional.conv2d(
                    maps, weights[f"{name}.weight"], weights[f"{name}.bias"], stride=2, padding=1
                )
            return torch.stack(
                [maps[0, :, y, x] for y in range(config.grid) for x in range(config.grid)]
            )
        kernel = weights["patch_embed.proj.weight"].flatten(1)
        size = config.patch_size
        return torch.stack(
            [
                kernel @ image[:, y : y + size, x : x + size].flatten()
                + weights["patch_embed.proj.bias"]
                for y in range(0, config.image_size, size)
                for x in range(0, config.image_size, size)
            ]
        )

    def feature(image: int) -> Tensor:
        position = weights["pos_embed"][0]
        class_token = weights["cls_token"][0]
        if config.position_for_class:
            class_token, position = class_token + position[:1], position[1:]
        registers = [weights["reg_token"][0]] if config.registers else []
        tokens = torch.cat([class_token, *registers, patches(images[image]) + position])
        for block in range(config.depth):
            name = f"blocks.{block}"
            attended = attend(norm(tokens, f"{name}.norm1"), block, image, tokens[0])
            tokens = tokens + scaled(attended, f"{name}.ls1")
            hidden = gelu(linear(norm(tokens, f"{name}.norm2"), f"{name}.mlp.fc1"))
            added = torch.zeros(())
            if adapter is not None:
                added = torch.stack([adapter(block, token) for token in tokens])
            tokens = tokens + scaled(linear(hidden, f"{name}.mlp.fc2"), f"{name}.ls2") + added
        return norm(tokens, "norm")[0]

    return torch.stack([feature(image) for image in range(len(images))])
