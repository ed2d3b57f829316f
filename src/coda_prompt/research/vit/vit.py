"""The Vision Transformer of all methods: timm's parameter names, and slots in every block.

Only the class token is used in the end, so the last block computes nothing for the other tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from coda_prompt.research.vit.fast_cpu import AttentionInFloat32
from coda_prompt.research.vit.half_blocks import (
    FrozenAttention,
    FrozenMLP,
    Projected,
    add_residual,
    frozen_layers,
)
from coda_prompt.research.vit.linear import Linear

Prefix = tuple[Tensor, Tensor]
"""Keys and values, each batch x rows x width (a batch of 1 serves every image)."""
Prefixes = Mapping[int, Prefix]
"""Block index -> prefix."""


@dataclass(frozen=True)
class LowRank:
    """A low-rank change of a linear map: x -> W x + scale * up (down x)."""

    down: Tensor
    """rank x inputs."""
    up: Tensor
    """outputs x rank."""
    scale: float = 1.0

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(inputs, self.down), self.up)


@dataclass(frozen=True)
class BlockEdits:
    """What a method changes in one block of a pass."""

    prefix: Prefix | Callable[[Tensor], Prefix] | None = None
    """Rows in front of keys and values, or a function that makes them from the tokens that enter
    the block (B x tokens x D)."""
    deltas: Mapping[Literal["q", "k", "v", "fc1", "fc2"], LowRank] = field(default_factory=dict)
    """Low-rank changes of the linear maps."""
    adapter: Callable[[Tensor], Tensor] | None = None
    """A function a of the residual stream x beside the MLP: x + MLP(norm2(x)) + a(x)."""
    tap: Callable[[Tensor], object] | None = None
    """Called with the output of norm1, the input of the attention (B x tokens x D)."""


Edits = Mapping[int, BlockEdits | Prefix]
"""Block index -> its edits; a bare pair of tensors is a prefix."""
NO_EDITS = BlockEdits()


class StartedPass(NamedTuple):
    """A batch at the first edited block: the plain and the prompted pass agree up to there."""

    tokens: Tensor
    """B x tokens x D, as they enter `block`."""
    projected: Projected | None
    """Queries, keys and values of that block, before any prefix; None: not yet computed."""
    block: int


Images = Tensor | StartedPass
"""B x C x H x W, or the same batch at a later block."""


@dataclass(frozen=True)
class ViTConfig:
    """An architecture. Sizes are in pixels, tokens or channels."""

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int = 3072
    registers: int = 0
    layer_scale: bool = False
    norm_eps: float = 1e-6
    position_for_class: bool = True
    """Whether the position embedding has a row for the class token (DINOv2 with registers: no)."""
    stem: tuple[int, ...] = ()
    """Hidden channels of a stem of 3x3 stride-2 convolutions; empty: one patch projection."""
    pre_norm: bool = False
    """Whether tokens are normalised before the first block (CLIP)."""
    quick_gelu: bool = False
    """Whether MLPs use x * sigmoid(1.702 x) instead of GELU (OpenAI's CLIP)."""
    rotary: bool = False
    """Whether queries and keys of patches are rotated by their position (DINOv3) instead of a
    position embedding."""

    @property
    def grid(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Tokens of an image: class token, registers and patches."""
        return 1 + self.registers + self.grid**2


class PatchEmbedding(nn.Module):
    """Non-overlapping patches through one linear map (timm's `patch_embed.proj`)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patch = config.patch_size
        self.proj = nn.Conv2d(config.channels, config.width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)  # B x tokens x D


class ConvStem(nn.Module):
    """3x3 stride-2 convolutions with GELU between them; small images train faster with it."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        channels = (config.channels, *config.stem, config.width)
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in pairwise(channels)
        )

    def forward(self, images: Tensor) -> Tensor:
        maps = self.convs[0](images)
        for conv in self.convs[1:]:
            maps = conv(F.gelu(maps))
        return maps.flatten(2).transpose(1, 2)  # B x tokens x D


class LayerScale(nn.Module):
    """Factors of what a layer adds to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, prefix: Prefix | None) -> Tensor:
        """Attend. A prefix comes after the projection, as in the released code of DualPrompt and
        CODA-Prompt; eq. 2 of the paper has it before."""
        if prefix is not None:
            key, value = (
                torch.cat([rows.expand(key.shape[0], -1, -1).to(own.dtype), own], dim=1)
                for rows, own in zip(prefix, (key, value), strict=True)
            )
            query = query.contiguous()  # a view would keep the keys and values for backward twice
        by_head = [  # B x heads x tokens x D/h
            rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in (query, key, value)
        ]
        if query.dtype == torch.bfloat16 and query.device.type == "cpu":
            attended = AttentionInFloat32.apply(*by_head)  # type: ignore[no-untyped-call]
        else:
            attended = F.scaled_dot_product_attention(*by_head)
        return self.proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, quick_gelu: bool = False) -> None:
        super().__init__()
        self.quick_gelu = quick_gelu
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)

    def forward(self, tokens: Tensor, edits: BlockEdits = NO_EDITS) -> Tensor:
        deltas = edits.deltas
        if "fc1" in deltas or self.quick_gelu:
            hidden = self.fc1(tokens)
            if "fc1" in deltas:
                hidden = hidden + deltas["fc1"](tokens)
            hidden = hidden * torch.sigmoid(1.702 * hidden) if self.quick_gelu else F.gelu(hidden)
        else:
            hidden = self.fc1(tokens, gelu=True)
        outputs: Tensor = self.fc2(hidden)
        return outputs + deltas["fc2"](hidden) if "fc2" in deltas else outputs


class Block(nn.Module):
    """A pre-norm transformer block with optional LayerScale.

    On a CPU, layers with frozen weights are computed together: their forward hooks do not run.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = Attention(width, config.heads)
        self.ls1 = LayerScale(width) if config.layer_scale else None
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(width, config.mlp_width, config.quick_gelu)
        self.ls2 = LayerScale(width) if config.layer_scale else None

    def project(self, tokens: Tensor, class_only: bool, edits: BlockEdits = NO_EDITS) -> Projected:
        """Queries (of the class token alone in the last block), keys and values."""
        tokens = self.norm1(tokens)
        if edits.tap is not None:
            edits.tap(tokens)
        queried = tokens[:, :1] if class_only else tokens
        if class_only:
            width = tokens.shape[-1]
            query = self.attn.qkv(queried, slice(width))
            key, value = self.attn.qkv(tokens, slice(width, None)).chunk(2, dim=-1)
        else:
            query, key, value = self.attn.qkv(tokens).chunk(3, dim=-1)
        if "q" in edits.deltas:
            query = query + edits.deltas["q"](queried)
        if "k" in edits.deltas:
            key = key + edits.deltas["k"](tokens)
        if "v" in edits.deltas:
            value = value + edits.deltas["v"](tokens)
        if self.config.rotary:
            query = query if class_only else rotate(query, self.config)
            key = rotate(key, self.config)
        return query, key, value

    def forward(
        self,
        tokens: Tensor,
        edits: BlockEdits = NO_EDITS,
        class_only: bool = False,
        projected: Projected | None = None,
    ) -> Tensor:
        """`projected`: what `project` returns for these tokens without edits, if known."""
        if edits.deltas or edits.tap is not None:
            projected = None
        prefix = edits.prefix(tokens) if callable(edits.prefix) else edits.prefix
        tokens = self._after_attention(tokens, edits, class_only, projected, prefix)
        layers = None
        if not (self.config.quick_gelu or "fc1" in edits.deltas or "fc2" in edits.deltas):
            layers = frozen_layers(tokens, self.norm2, self.mlp.fc1, self.mlp.fc2, _gamma(self.ls2))
        if layers is not None:
            outputs: Tensor = FrozenMLP.apply(tokens, layers)  # type: ignore[no-untyped-call]
        else:
            outputs = add_residual(tokens, self.mlp(self.norm2(tokens), edits), _gamma(self.ls2))
        return outputs if edits.adapter is None else outputs + edits.adapter(tokens)

    def _after_attention(
        self,
        tokens: Tensor,
        edits: BlockEdits,
        class_only: bool,
        projected: Projected | None,
        prefix: Prefix | None,
    ) -> Tensor:
        """The residual stream between attention and MLP."""
        attn = self.attn
        edited = bool(edits.deltas) or edits.tap is not None or self.config.rotary
        if not (class_only or edited or _any_needs_gradient(tokens, projected)):
            layers = frozen_layers(tokens, self.norm1, attn.qkv, attn.proj, _gamma(self.ls1))
            if layers is not None:
                keys, values = prefix or (None, None)
                keys = None if keys is None else keys.expand(len(tokens), -1, -1)
                values = None if values is None else values.expand(len(tokens), -1, -1)
                arguments = (keys, values, projected, layers, attn.heads)
                return FrozenAttention.apply(tokens, *arguments)  # type: ignore[no-untyped-call]
        attended = attn(*(projected or self.project(tokens, class_only, edits)), prefix)
        tokens = tokens[:, :1] if class_only else tokens
        return add_residual(tokens, attended, _gamma(self.ls1))


def _gamma(scale: LayerScale | None) -> Tensor | None:
    return None if scale is None else scale.gamma


def _any_needs_gradient(tokens: Tensor, projected: Projected | None) -> bool:
    """Whether the gradient would have to pass through known projections."""
    return (
        projected is not None
        and torch.is_grad_enabled()
        and any(rows.requires_grad for rows in (tokens, *projected))
    )


class ViT(nn.Module):
    """A Vision Transformer without a classifier."""

    pos_embed: nn.Parameter
    recompute = False
    """Recompute the activations of blocks in the backward pass instead of storing them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width, tokens = config.width, config.grid**2
        self.patch_embed = ConvStem(config) if config.stem else PatchEmbedding(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.reg_token = (
            nn.Parameter(torch.zeros(1, config.registers, width)) if config.registers else None
        )
        rows = tokens + config.position_for_class
        position = None if config.rotary else nn.Parameter(torch.zeros(1, rows, width))
        self.register_parameter("pos_embed", position)
        self.norm_pre = (
            nn.LayerNorm(width, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)

    def initialise(self, generator: torch.Generator) -> ViT:
        """Weights to pre-train from: truncated normal matrices, zero biases."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 4:
                fan_in = parameter[0].numel()
                nn.init.trunc_normal_(parameter, std=fan_in**-0.5, generator=generator)
            elif parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return self

    def features(self, images: Images, edits: Edits | None = None, *, norm: bool = True) -> Tensor:
        """The class token of each image, B x D, with edits in the given blocks.

        Args:
            images: Pixels, or what `start` returns.
            edits: What methods change in blocks.
            norm: Apply the final norm.
        """
        tokens, projected, first = self._entered(images)
        tokens = self.run(tokens, range(first, len(self.blocks)), edits, projected=projected)
        return self.norm(tokens[:, 0]) if norm else tokens[:, 0]

    forward = features

    def pooled_features(self, images: Images, last: int, edits: Edits | None = None) -> Tensor:
        """The final-norm class token and mean patch token after each of the last blocks.

        Args:
            images: Images, or a pass started up to a block before them.
            last: The number of blocks.
            edits: What methods change in blocks.

        Returns:
            B x (2 * last * D).
        """
        tokens, projected, first = self._entered(images)
        pooled = []
        for index in range(first, len(self.blocks)):
            tokens = self.run(tokens, [index], edits, projected=projected, class_only=False)
            projected = None
            if index >= len(self.blocks) - last:
                normed = self.norm(tokens)
                pooled += [normed[:, 0], normed[:, 1 + self.config.registers :].mean(dim=1)]
        return torch.cat(pooled, dim=1)

    def _entered(self, images: Images) -> StartedPass:
        """Return a started pass as it is, and images at the first block."""
        if isinstance(images, StartedPass):
            return images
        return StartedPass(self.embed(images), None, 0)

    def embed(self, images: Tensor) -> Tensor:
        """The tokens that enter the first block (class, registers, patches), B x tokens x D."""
        tokens = self.patch_embed(images)
        class_token: Tensor = self.cls_token
        if not self.config.rotary:
            position: Tensor = self.pos_embed
            if self.config.position_for_class:
                class_token = class_token + position[:, :1]
                position = position[:, 1:]
            tokens = tokens + position
        leading = [class_token] if self.reg_token is None else [class_token, self.reg_token]
        expanded = [token.expand(images.shape[0], -1, -1) for token in leading]
        return self.norm_pre(torch.cat([*expanded, tokens], dim=1))

    def run(
        self,
        tokens: Tensor,
        blocks: Iterable[int] | None = None,
        edits: Edits | None = None,
        *,
        projected: Projected | None = None,
        class_only: bool = True,
    ) -> Tensor:
        """Run tokens through some blocks.

        Args:
            tokens: B x tokens x D, as they enter the first of the blocks.
            blocks: Indices of the blocks; None: all.
            edits: What methods change in blocks.
            projected: What `project` of the first of the blocks returns for these tokens.
            class_only: In the last block of the ViT, compute the class token alone.

        Returns:
            The tokens after these blocks.
        """
        for index in range(len(self.blocks)) if blocks is None else blocks:
            edit = edits.get(index, NO_EDITS) if edits else NO_EDITS
            if not isinstance(edit, BlockEdits):
                edit = BlockEdits(edit)
            last = class_only and index == len(self.blocks) - 1
            arguments = (tokens, edit, last, projected)
            if self.recompute and torch.is_grad_enabled():
                tokens = checkpoint(self.blocks[index], *arguments, use_reentrant=False)
            else:
                tokens = self.blocks[index](*arguments)
            projected = None
        return tokens

    def cast_weights(self) -> None:
        """Cast frozen weights now, in autocast: several threads would do it at the same time."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.weights(self.cls_token.device.type)

    @torch.no_grad()
    def start(self, images: Images, block: int = 0) -> StartedPass:
        """Run images without edits and gradients up to the projections of a block.

        A started pass is returned as it is.
        """
        if isinstance(images, StartedPass):
            return images
        tokens = self.run(self.embed(images), range(block))
        first: Block = self.blocks[block]  # type: ignore[assignment]
        projected = first.project(tokens, class_only=block == len(self.blocks) - 1)
        return StartedPass(tokens, projected, block)

    def early_features(self, started: StartedPass) -> Tensor:
        """The final-norm class token as it enters the block of a started pass, B x D."""
        return self.norm(started.tokens[:, 0])

    @torch.no_grad()
    def merge(self, edits: Edits) -> None:
        """Add the low-rank deltas of `edits` to the weights; other edits are ignored."""
        for index, edit in edits.items():
            block: Block = self.blocks[index]  # type: ignore[assignment]
            query, key, value = block.attn.qkv.weight.chunk(3)
            weights = {"q": query, "k": key, "v": value}
            weights |= {"fc1": block.mlp.fc1.weight, "fc2": block.mlp.fc2.weight}
            for name, delta in edit.deltas.items() if isinstance(edit, BlockEdits) else ():
                weights[name] += delta.scale * delta.up @ delta.down

    def fingerprint(self) -> str:
        """Return a hash of all weights: learned prompts are only valid with the same backbone."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            values = tensor.detach().to("cpu", torch.float32).contiguous()
            digest.update(f"{name}{tuple(values.shape)}".encode())
            digest.update(values.numpy().data)
        return digest.hexdigest()


def rotate(rows: Tensor, config: ViTConfig) -> Tensor:
    """Rotate queries or keys (B x tokens x D) of patches by their position, as in DINOv3.

    Half of the pairs of channels turn with the row and half with the column, with periods from 1
    to 100 half images. The class token and registers, which come first, are not rotated.
    """
    leading, head = 1 + config.registers, config.width // config.heads
    centres = (torch.arange(config.grid, device=rows.device) + 0.5) / config.grid * 2 - 1
    periods = 100 ** (torch.arange(head // 4, device=rows.device) / (head // 4))
    turns = (2 * math.pi * centres[:, None] / periods).expand(config.grid, -1, -1)
    angles = torch.cat([turns.transpose(0, 1), turns], dim=-1)  # rows x columns x D/2h
    angles = angles.flatten(0, 1).repeat(1, 2)[:, None]  # tokens x 1 x D/h
    patches = rows[:, leading:].unflatten(-1, (config.heads, head))  # B x tokens x h x D/h
    first, second = patches.chunk(2, dim=-1)
    turned = patches * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([rows[:, :leading], turned.flatten(2).to(rows.dtype)], dim=1)


def resize_positions(position: Tensor, config: ViTConfig) -> Tensor:
    """The position embedding of another square grid, resampled to the grid of `config`."""
    leading = int(config.position_for_class)
    old_grid = math.isqrt(position.shape[1] - leading)
    if old_grid == config.grid:
        return position
    patches = position[:, leading:].unflatten(1, (old_grid, old_grid)).permute(0, 3, 1, 2)
    patches = F.interpolate(
        patches.float(), size=(config.grid, config.grid), mode="bicubic", antialias=True
    )
    patches = patches.permute(0, 2, 3, 1).flatten(1, 2).to(position.dtype)
    return torch.cat([position[:, :leading], patches], dim=1)
