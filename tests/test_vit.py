"""The ViT against a naive implementation, the released code's numbers and timm's."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from naive import naive_features, random_vit
from safetensors.torch import load_file
from small import tiny_vit
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research.vit.vit import BlockEdits, LowRank, ViT, ViTConfig, resize_positions
from coda_prompt.research.vit.weights import load_weights

GOLDEN = Path(__file__).parent / "golden" / "released.safetensors"
TIMM = Path(__file__).parent / "fixtures" / "timm"

PLAIN = ViTConfig(image_size=12, patch_size=4, width=16, depth=3, heads=2, mlp_width=24)
REGISTERS = ViTConfig(
    image_size=12,
    patch_size=4,
    width=16,
    depth=3,
    heads=4,
    mlp_width=24,
    registers=2,
    layer_scale=True,
    position_for_class=False,
)
REGISTERS_AND_CLASS_POSITION = ViTConfig(
    image_size=12, patch_size=4, width=16, depth=2, heads=2, mlp_width=24, registers=3
)
ONE_CHANNEL_STEM = ViTConfig(
    image_size=16, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=24, stem=(8,)
)
ARCHITECTURES = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(REGISTERS, id="registers, LayerScale, no class position"),
    pytest.param(REGISTERS_AND_CLASS_POSITION, id="registers, class position"),
    pytest.param(ONE_CHANNEL_STEM, id="convolutional stem"),
]


def random_images(config: ViTConfig, count: int = 2) -> Tensor:
    size = (count, config.channels, config.image_size, config.image_size)
    return torch.rand(size, generator=torch.Generator().manual_seed(1))


def random_prefixes(
    config: ViTConfig, blocks: list[int], batch: int = 2, rows: int = 3
) -> dict[int, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)

    def leaf() -> Tensor:
        return torch.randn(batch, rows, config.width, generator=generator).requires_grad_()

    return {block: (leaf(), leaf()) for block in blocks}


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_features_equal_a_naive_vit_that_computes_every_token(config: ViTConfig) -> None:
    vit, images = random_vit(config), random_images(config)
    torch.testing.assert_close(
        vit.features(images), naive_features(vit, images), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_prefixes_in_every_block_give_the_naive_outputs_and_gradients(config: ViTConfig) -> None:
    vit, images = random_vit(config), random_images(config)
    prefixes = random_prefixes(config, list(range(config.depth)))
    leaves = [leaf for pair in prefixes.values() for leaf in pair]
    direction = torch.randn(2, config.width, generator=torch.Generator().manual_seed(3))

    ours = vit.features(images, prefixes)
    naive = naive_features(vit, images, prefixes)
    torch.testing.assert_close(ours, naive, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, vit.features(images), atol=1e-3)

    our_gradients = torch.autograd.grad((ours * direction).sum(), leaves)
    naive_gradients = torch.autograd.grad((naive * direction).sum(), leaves)
    for our_gradient, naive_gradient in zip(our_gradients, naive_gradients, strict=True):
        assert our_gradient.abs().max() > 1e-4
        torch.testing.assert_close(our_gradient, naive_gradient, atol=1e-5, rtol=1e-5)


def test_prefixes_in_some_blocks_leave_the_others_alone() -> None:
    vit, images = random_vit(PLAIN), random_images(PLAIN)
    prefixes = random_prefixes(PLAIN, [1])
    torch.testing.assert_close(
        vit.features(images, prefixes),
        naive_features(vit, images, prefixes),
        atol=1e-5,
        rtol=1e-5,
    )


def test_a_prefix_with_a_batch_of_one_serves_every_image() -> None:
    vit, images = random_vit(PLAIN), random_images(PLAIN, count=3)
    shared = random_prefixes(PLAIN, [0, 2], batch=1)
    repeated = {
        block: (keys.expand(3, -1, -1), values.expand(3, -1, -1))
        for block, (keys, values) in shared.items()
    }
    torch.testing.assert_close(vit.features(images, shared), vit.features(images, repeated))


def test_prefixes_go_in_after_the_projection() -> None:
    attention = random_vit(PLAIN).blocks[0].attn
    attention.qkv.weight.zero_()
    attention.qkv.bias.zero_()
    tokens = torch.randn(2, 10, PLAIN.width, generator=torch.Generator().manual_seed(4))
    keys, values = random_prefixes(PLAIN, [0])[0]
    # All scores are zero, so every token gets the plain mean of 3 prefix values and 10 zeros; a
    # prefix that went through the (zero) projection would vanish.
    mean = values.sum(dim=1, keepdim=True) / 13
    expected = attention.proj(mean).expand(-1, 10, -1)
    projected = attention.qkv(tokens).chunk(3, dim=-1)
    found = attention(*projected, (keys, values))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_prefixes_do_not_change_the_number_of_tokens() -> None:
    vit, images = random_vit(REGISTERS), random_images(REGISTERS)
    shapes: list[tuple[int, ...]] = []
    for block in vit.blocks:
        block.register_forward_hook(lambda _, __, tokens: shapes.append(tuple(tokens.shape)))
    vit.features(images, random_prefixes(REGISTERS, [0, 1, 2]))
    everything = (2, 1 + 2 + 9, 16)
    assert shapes == [everything, everything, (2, 1, 16)]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_passes_that_agree_up_to_a_block_share_their_start(first: int) -> None:
    vit, images = random_vit(REGISTERS), random_images(REGISTERS)
    prefixes = random_prefixes(REGISTERS, list(range(first, 3)))
    started = vit.start(images, first)
    assert torch.equal(vit.features(started, prefixes), vit.features(images, prefixes))
    if first < 2:
        assert torch.equal(vit.features(started), vit.features(images))
    else:  # the last block does not project tokens to keys and values that are not known
        assert_close(vit.features(started), vit.features(images), atol=1e-6, rtol=1e-5)


def test_an_early_feature_is_that_of_a_network_cut_off_there() -> None:
    vit, images = random_vit(PLAIN), random_images(PLAIN)
    early = vit.early_features(vit.start(images, 2))
    del vit.blocks[2:]
    torch.testing.assert_close(early, vit.features(images), atol=1e-6, rtol=1e-5)


def test_a_feature_does_not_depend_on_the_other_images_of_the_batch() -> None:
    vit, images = random_vit(PLAIN), random_images(PLAIN, count=4)
    alone = torch.cat([vit.features(image[None]) for image in images])
    torch.testing.assert_close(vit.features(images), alone, atol=1e-5, rtol=1e-5)


def test_the_query_of_the_released_code_is_reproduced() -> None:
    golden = load_file(GOLDEN)
    vit = ViT(ViTConfig(image_size=32, patch_size=8, width=32, depth=6, heads=4, mlp_width=128))
    weights = {
        name.removeprefix("vit."): tensor
        for name, tensor in golden.items()
        if name.startswith("vit.")
    }
    vit.load_state_dict(weights)
    torch.testing.assert_close(
        vit.eval().features(golden["images"]), golden["query"], atol=1e-5, rtol=0
    )


def test_a_vit_b16_without_head_has_the_papers_number_of_parameters() -> None:
    with torch.device("meta"):
        vit = ViT(ViTConfig())
    assert sum(parameter.numel() for parameter in vit.parameters()) == 85_798_656


def test_an_initialised_vit_is_the_same_for_the_same_seed() -> None:
    first, second, other = (
        ViT(ONE_CHANNEL_STEM).initialise(torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert first.fingerprint() == second.fingerprint() != other.fingerprint()


def test_the_fingerprint_changes_with_one_weight() -> None:
    vit = random_vit(REGISTERS)
    same, changed = copy.deepcopy(vit), copy.deepcopy(vit)
    changed.blocks[1].mlp.fc2.weight[3, 5] += 1e-4
    assert same.fingerprint() == vit.fingerprint()
    assert changed.fingerprint() != vit.fingerprint()


def test_positions_of_the_same_grid_are_left_as_they_are() -> None:
    position = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(7))
    assert torch.equal(resize_positions(position, PLAIN), position)


@pytest.mark.parametrize("for_class", [True, False])
def test_resampled_positions_keep_the_class_row_and_the_direction_of_the_axes(
    for_class: bool,
) -> None:
    config = ViTConfig(
        image_size=8, patch_size=1, width=2, heads=1, mlp_width=2, position_for_class=for_class
    )
    down, across = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    grid = torch.stack([down, across], dim=-1).reshape(1, 256, 2)
    class_row = torch.tensor([[[100.0, -100.0]]])
    position = torch.cat([class_row, grid], dim=1) if for_class else grid

    resized = resize_positions(position, config)

    if for_class:
        assert torch.equal(resized[:, :1], class_row)
    patches = resized[0, int(for_class) :].reshape(8, 8, 2)
    # The centre of new cell i lies at 2 i + 0.5; away from the border a ramp stays the same ramp.
    centres = torch.arange(2, 6) * 2 + 0.5
    inner = patches[2:6, 2:6]
    torch.testing.assert_close(inner[..., 0], centres[:, None].expand(4, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(inner[..., 1], centres[None, :].expand(4, 4), atol=1e-4, rtol=0)


SMALL_TIMM = ViTConfig(image_size=24, patch_size=6, width=24, depth=2, heads=2, mlp_width=96)
TIMM_MODELS = {
    "vit": SMALL_TIMM,
    "deit": SMALL_TIMM,
    "dinov2": replace(SMALL_TIMM, layer_scale=True),
    "dinov2-reg": replace(SMALL_TIMM, layer_scale=True, registers=4, position_for_class=False),
    "dinov3": replace(SMALL_TIMM, layer_scale=True, registers=4, rotary=True, norm_eps=1e-5),
    "clip-openai": replace(SMALL_TIMM, pre_norm=True, quick_gelu=True, norm_eps=1e-5),
    "clip-laion2b": replace(SMALL_TIMM, pre_norm=True, norm_eps=1e-5),
}


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_features_equal_timm(name: str) -> None:
    vit = ViT(TIMM_MODELS[name]).eval()
    load_weights(vit, TIMM / f"{name}.safetensors")
    expected = load_file(TIMM / "expected.safetensors")
    with torch.no_grad():
        features = vit.features(expected[f"{name}.images"])
    torch.testing.assert_close(features, expected[f"{name}.features"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dinov3", "clip-openai"])
def test_rotary_and_pre_norm_passes_agree(name: str) -> None:
    """A pass from a later block, with prefixes, and the class-token-only last block."""
    config = replace(TIMM_MODELS[name], depth=3)
    vit = random_vit(config)
    images, prefixes = random_images(config), random_prefixes(config, [1, 2])
    assert_close(vit.features(vit.start(images, 1), prefixes), vit.features(images, prefixes))
    tokens = vit.run(vit.embed(images), range(2))
    assert_close(vit.blocks[2](tokens, class_only=True), vit.blocks[2](tokens)[:, :1])


def test_resampled_positions_equal_timm() -> None:
    config = ViTConfig(patch_size=14, width=8, heads=1)
    expected = load_file(TIMM / "expected.safetensors")
    resized = resize_positions(expected["positions.37"], config)
    torch.testing.assert_close(resized, expected["positions.16"], atol=1e-5, rtol=1e-5)


def low_rank(inputs: int, outputs: int, seed: int) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(3, inputs, generator=generator) / inputs**0.5
    return LowRank(down, torch.randn(outputs, 3, generator=generator) / 3**0.5, scale=0.5)


def edited(blocks: int = 6) -> dict[int, BlockEdits]:
    """Low-rank deltas of all five maps in every block of the tiny ViT."""
    sizes = {"q": (32, 32), "k": (32, 32), "v": (32, 32), "fc1": (32, 64), "fc2": (64, 32)}
    return {
        block: BlockEdits(
            deltas={name: low_rank(*size, seed=block) for name, size in sizes.items()}  # type: ignore[misc]
        )
        for block in range(blocks)
    }


def test_merged_deltas_equal_unmerged_ones() -> None:
    vit, images = tiny_vit(), torch.rand(3, 1, 16, 16)
    unmerged, plain = vit.features(images, edited()), vit.features(images)
    assert (unmerged - plain).abs().max() > 0.1
    started = vit.start(images)
    assert_close(vit.features(started, edited()), unmerged)
    vit.merge(edited())
    assert_close(vit.features(images), unmerged, rtol=1e-4, atol=1e-5)


def test_deltas_and_adapters_of_zero_change_nothing() -> None:
    vit, images = tiny_vit(), torch.rand(3, 1, 16, 16)
    zero = LowRank(torch.randn(2, 32), torch.zeros(32, 2))
    edits = BlockEdits(deltas={"q": zero, "v": zero}, adapter=torch.zeros_like)
    found = vit.features(images, dict.fromkeys(range(6), edits))
    assert_close(found, vit.features(images), atol=1e-6, rtol=1e-5)


def test_an_adapter_sees_the_residual_stream_beside_the_mlp() -> None:
    vit, images = tiny_vit(), torch.rand(3, 1, 16, 16)
    block = vit.blocks[2]
    tokens = vit.run(vit.embed(images), range(2))
    stream = tokens + block.attn(*block.project(tokens, class_only=False), None)
    expected = stream + block.mlp(block.norm2(stream)) + stream.tanh()
    found = vit.run(tokens, [2], {2: BlockEdits(adapter=torch.tanh)})
    assert_close(found, expected)


def test_a_prefix_may_depend_on_the_tokens_that_enter_its_block() -> None:
    vit, images = tiny_vit(), torch.rand(3, 1, 16, 16)
    entered: list[torch.Tensor] = []

    def prefix(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        entered.append(tokens)
        return tokens[:, :1], -tokens[:, :1]

    found = vit.features(images, {3: BlockEdits(prefix=prefix)})
    tokens = vit.run(vit.embed(images), range(3))
    assert_close(entered[0], tokens)
    assert_close(found, vit.features(images, {3: (tokens[:, :1], -tokens[:, :1])}))


def test_a_tap_reads_the_input_of_the_attention_and_changes_nothing() -> None:
    vit, images = tiny_vit(), torch.rand(3, 1, 16, 16)
    seen: list[torch.Tensor] = []
    found = vit.features(images, {1: BlockEdits(tap=seen.append)})
    assert torch.equal(found, vit.features(images))
    tokens = vit.run(vit.embed(images), [0])
    assert_close(seen[0], vit.blocks[1].norm1(tokens))


def test_block_by_block_is_the_whole_pass() -> None:
    vit, images = tiny_vit(), torch.rand(3, 1, 16, 16)
    tokens = vit.embed(images)
    for block in range(6):
        tokens = vit.run(tokens, [block], edited())
    assert tokens.shape == (3, 1, 32)
    assert torch.equal(vit.norm(tokens[:, 0]), vit.features(images, edited()))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_reach_deltas_and_adapters(recompute: bool) -> None:
    vit, images = tiny_vit().requires_grad_(False), torch.rand(3, 1, 16, 16)
    vit.recompute = recompute
    up, factor = torch.zeros(32, 3, requires_grad=True), torch.zeros((), requires_grad=True)
    delta = LowRank(torch.randn(3, 32), up)
    edits = BlockEdits(deltas={"k": delta}, adapter=lambda tokens: factor * tokens)
    vit.features(images, {2: edits, 5: edits})[:, 0].sum().backward()
    assert up.grad is not None
    assert factor.grad is not None
    assert up.grad.abs().max() > 0
    assert factor.grad.abs() > 0


def test_exported_graphs_have_a_dynamic_batch_and_matrices_only() -> None:
    """Quantisers take products with matrices, not those with the weights of each head."""
    vit, images = tiny_vit().requires_grad_(False), torch.rand(5, 1, 16, 16)
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(vit, (images[:2],), dynamic_shapes=shapes, strict=False)
    assert_close(exported.module()(images), vit.features(images), atol=1e-5, rtol=1e-5)
    graphs = [each.graph for each in exported.graph_module.modules() if hasattr(each, "graph")]
    targets = [str(node.target) for graph in graphs for node in graph.nodes]
    assert not [each for each in targets if "matmul" in each or "bmm" in each]
