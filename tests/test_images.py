"""Decoding, conversion and views of single images."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.errors import BadImage, BadOption, UnknownName
from coda_prompt.images.preprocessing import Preprocessing, eval_view, required_min_side
from coda_prompt.images.reading import convert_channels, open_image
from coda_prompt.research.training.augmentation import (
    Augmentation,
    augmented_min_side,
    crop_box,
    training_view,
    view_generator,
)

PHOTOGRAPH = Preprocessing(224, 3, (0.5,) * 3, (0.5,) * 3)
PLAIN_GREY = Preprocessing(4, 1, (0.0,), (1.0,), "bilinear")
PLAIN_RGB = Preprocessing(4, 3, (0.0,) * 3, (1.0,) * 3, "bilinear")
WHOLE = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0)


def noise(height: int, width: int, *channels: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, *channels), np.uint8)


def photo(width: int, height: int) -> Image.Image:
    """A smooth random image."""
    return Image.fromarray(noise(8, 10, 3)).resize((width, height), Image.Resampling.BICUBIC)


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header states this size, with little data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


# --- opening files ---


@pytest.mark.parametrize(
    "suffix", ["png", "bmp", "gif", "tif", "tiff", "webp", "ppm", "jp2", "jpg", "jpeg", "avif"]
)
def test_every_format_decodes_to_a_usable_picklable_image(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (16, 12), (200, 40, 90)).save(path)
    image = open_image(path)
    for copy in (image, pickle.loads(pickle.dumps(image))):
        values = np.asarray(convert_channels(copy, 3)).astype(int)
        assert values.shape == (12, 16, 3)
        assert np.abs(values - (200, 40, 90)).max() <= 6


@pytest.mark.posix
def test_opened_files_are_closed(tmp_path: Path) -> None:
    for suffix in ("png", "tif", "gif", "webp"):
        path = tmp_path / f"a.{suffix}"
        Image.new("RGB", (8, 8)).save(path)
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        kept = [open_image(path) for _ in range(5)]
        after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        assert len(kept) == 5
        assert after == before


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_exif_orientation_is_applied_once(tmp_path: Path, suffix: str, orientation: int) -> None:
    upright = np.zeros((16, 32), np.uint8)
    upright[:8, :16] = 255  # the upper left quarter is white
    undo: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.T,
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).T,
        8: lambda a: np.rot90(a, -1),
    }
    stored = np.ascontiguousarray(undo[orientation](upright))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(stored).convert("RGB").save(path, exif=exif)
    image = open_image(path)
    values = np.asarray(convert_channels(image, 1)).astype(int)
    assert values.shape == (16, 32)
    assert np.abs(values - upright).max() <= 40  # JPEG blurs the edge
    assert image.getexif().get(0x0112, 1) == 1  # nobody turns it again


def test_image_with_damaged_metadata_still_opens(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 6), "red").save(path, exif=b"Exif\x00\x00garbage, no TIFF header")
    assert open_image(path).size == (8, 6)


def test_animation_opens_as_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    for suffix in ("gif", "png", "webp"):
        path = tmp_path / f"a.{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)
        assert convert_channels(open_image(path), 3).getpixel((3, 3)) == (255, 0, 0)


def damaged() -> dict[str, bytes]:
    jpeg, png = io.BytesIO(), io.BytesIO()
    photo(120, 90).save(jpeg, "JPEG")
    photo(120, 90).save(png, "PNG")
    return {
        "empty.jpg": b"",
        "text.jpg": b"this is no image",
        "truncated.jpg": jpeg.getvalue()[: len(jpeg.getvalue()) // 2],
        "truncated.png": png.getvalue()[: len(png.getvalue()) // 2],
        "header.jpg": jpeg.getvalue()[:30],
        "postscript.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        "bomb.png": png_header(60_000, 60_000),
        "large.png": png_header(10_000, 10_000),
    }


@pytest.mark.parametrize("name", damaged())
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_undecodable_file_raises_bad_image_with_its_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(damaged()[name])
    with pytest.raises(BadImage, match=name):
        open_image(path)


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb_raises_bad_image_when_warnings_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(png_header(10_000, 10_000))
    with pytest.raises(BadImage, match="large"):
        open_image(path)


def test_pixel_limit_applies_without_pillows_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    path = tmp_path / "large.png"
    path.write_bytes(png_header(10_000, 10_000))
    problem = "10000 x 10000 pixels are more than the limit of 89,478,485"
    with pytest.raises(BadImage, match=problem):
        open_image(path)


def test_formats_whose_decoder_starts_a_program_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "postscript.png"
    path.write_bytes(damaged()[path.name])
    with pytest.raises(BadImage, match="in none of the formats JPEG, PNG, "):
        open_image(path)


@pytest.mark.posix
def test_missing_file_or_named_pipe_raises_bad_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "none.jpg", tmp_path, tmp_path / "pipe.jpg"):
        with pytest.raises(BadImage, match="no such file"):
            open_image(path)


def test_color_mode_without_rgb_conversion_raises_bad_image(tmp_path: Path) -> None:
    path = tmp_path / "lab.tif"
    Image.new("LAB", (4, 4)).save(path)
    with pytest.raises(BadImage, match="LAB"):
        open_image(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_randomly_damaged_file_opens_or_raises_bad_image(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"]))
    stored = io.BytesIO()
    Image.fromarray(noise(12, 16, 3)).save(stored, kind)
    raw = bytearray(stored.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    path.write_bytes(raw)
    with contextlib.suppress(BadImage):  # and nothing else
        assert convert_channels(open_image(path), 3).mode == "RGB"


# --- channels ---


def test_grey_and_rgb_are_converted_as_pillow_does() -> None:
    grey = Image.fromarray(np.array([[0, 100, 255]], np.uint8))
    assert np.asarray(convert_channels(grey, 3)).tolist() == [[[0] * 3, [100] * 3, [255] * 3]]
    rgb = Image.fromarray(np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8))
    assert np.asarray(convert_channels(rgb, 1)).tolist() == [[76, 150, 29]]


def test_image_in_the_right_mode_is_not_copied() -> None:
    image = Image.new("RGB", (3, 3))
    assert convert_channels(image, 3) is image


def test_alpha_is_composited_over_white() -> None:
    rgba = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128]]], np.uint8)
    expected = [[[255, 0, 0], [255, 255, 255], [127, 127, 127]]]
    assert np.asarray(convert_channels(Image.fromarray(rgba), 3)).tolist() == expected
    grey_alpha = Image.fromarray(rgba).convert("LA")
    assert np.asarray(convert_channels(grey_alpha, 1)).tolist() == [[76, 255, 127]]


def test_transparent_color_is_composited_over_white(tmp_path: Path) -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 255, 0, 255, 0])
    palette.putdata([0, 1])
    palette.save(tmp_path / "a.png", transparency=1)
    plain = Image.fromarray(np.array([[[0, 0, 255], [9, 9, 9]]], np.uint8))
    plain.save(tmp_path / "b.png", transparency=(9, 9, 9))
    for name in ("a.png", "b.png"):
        image = convert_channels(open_image(tmp_path / name), 3)
        assert np.asarray(image).tolist() == [[[0, 0, 255], [255, 255, 255]]]


def test_palette_is_converted() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([1, 0])
    assert np.asarray(convert_channels(palette, 3)).tolist() == [[[40, 50, 60], [10, 20, 30]]]


def test_cmyk_and_black_and_white_become_rgb(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(path)
    red = np.asarray(convert_channels(open_image(path), 3))[4, 4].astype(int)
    assert np.abs(red - (255, 0, 0)).max() <= 6
    bits = Image.fromarray(np.array([[True, False]]))
    assert bits.mode == "1"
    assert np.asarray(convert_channels(bits, 3)).tolist() == [[[255] * 3, [0] * 3]]


def test_sixteen_bit_values_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32768, 65278, 65535]], np.uint16)
    expected = [[0, 1, 128, 254, 255]]
    Image.fromarray(values).save(tmp_path / "a.png")
    Image.fromarray(values).save(tmp_path / "a.tif")
    (tmp_path / "a.pgm").write_bytes(b"P5 5 1 65535\n" + values.astype(">u2").tobytes())
    for name in ("a.png", "a.tif", "a.pgm"):
        assert np.asarray(convert_channels(open_image(tmp_path / name), 1)).tolist() == expected
    assert np.asarray(convert_channels(Image.fromarray(values), 3))[0, 2].tolist() == [128] * 3


def test_float_pixels_are_read_as_zero_to_one_or_zero_to_255() -> None:
    unit = Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan]], np.float32))
    assert np.asarray(convert_channels(unit, 1)).tolist() == [[0, 128, 255, 0]]
    levels = Image.fromarray(np.array([[-3.0, 17.0, 300.0]], np.float32))
    assert np.asarray(convert_channels(levels, 1)).tolist() == [[0, 17, 255]]


def test_other_channel_counts_are_rejected() -> None:
    with pytest.raises(BadOption, match="1 or 3 channels, not 4"):
        convert_channels(Image.new("RGB", (2, 2)), 4)


# --- training views ---


def crops(width: int, height: int, augmentation: Augmentation, count: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(7)
    return np.array([crop_box(width, height, augmentation, rng) for _ in range(count)])


def test_crop_area_and_position_are_uniform_and_ratio_log_uniform() -> None:
    boxes = crops(1000, 1000, Augmentation(scale=(0.25, 0.5)), 8000)  # every first try fits
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas = widths * heights / 1e6
    quantiles = np.quantile(areas, [0, 0.25, 0.5, 0.75, 1])
    assert quantiles == pytest.approx([0.25, 0.3125, 0.375, 0.4375, 0.5], abs=0.006)
    ratios = np.log(widths / heights) / np.log(4 / 3)  # uniform in -1 .. 1
    assert np.quantile(ratios, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx(
        [-1, -0.5, 0, 0.5, 1], abs=0.05
    )
    for first, size in ((boxes[:, 0], widths), (boxes[:, 1], heights)):
        place = (first + 0.5) / (1000 - size + 1)  # uniform in 0 .. 1
        assert np.quantile(place, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx(
            [0, 0.25, 0.5, 0.75, 1], abs=0.02
        )


def test_default_crops_follow_torchvisions_rejection_rule() -> None:
    boxes = crops(500, 400, Augmentation(), 8000)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 200_000
    rng = np.random.default_rng(1)
    area = rng.uniform(0.08, 1, 200_000)
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), 200_000))
    fits = (np.sqrt(area * ratio * 200_000) <= 500) & (np.sqrt(area / ratio * 200_000) <= 400)
    levels = [0.1, 0.3, 0.5, 0.7, 0.9]
    assert np.quantile(areas, levels) == pytest.approx(np.quantile(area[fits], levels), abs=0.015)
    assert areas.min() >= 0.079
    assert fits.mean() < 0.95  # the rule has been at work


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1000, 10), (493, 0, 506, 10)),  # width 13 = round(10 * 4/3)
        ((10, 1000), (0, 493, 10, 506)),  # height 13 = round(10 / (3/4))
        ((5000, 1), (2499, 0, 2500, 1)),
    ],
)
def test_image_that_no_crop_fits_gives_the_central_crop(
    size: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert crop_box(*size, Augmentation(scale=(0.9, 1.0)), np.random.default_rng(0)) == expected


class Highest(np.random.Generator):
    def random(self) -> float:  # type: ignore[override]
        return 1 - 2**-53


def test_whole_image_is_used_after_ten_failed_draws() -> None:
    always_wide = Augmentation(scale=(1.0, 1.0), ratio=(0.5, 2.0))
    assert crop_box(100, 80, always_wide, Highest(np.random.PCG64(0))) == (0, 0, 100, 80)


def test_crop_can_reach_the_last_row_and_column() -> None:
    quarter = Augmentation(scale=(0.25, 0.25), ratio=(1.0, 1.0))
    assert crop_box(20, 20, quarter, Highest(np.random.PCG64(0))) == (10, 10, 20, 20)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32), st.floats(0.001, 1))
def test_crop_is_within_the_image(width: int, height: int, seed: int, low: float) -> None:
    augmentation = Augmentation(scale=(low, 1.0), ratio=(0.3, 5.0))
    left, top, right, bottom = crop_box(width, height, augmentation, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_flip_probability_is_respected() -> None:
    image = Image.fromarray(np.array([[0, 255], [0, 255]], np.uint8))
    pixels = Preprocessing(2, 1, (0.0,), (1.0,))

    def rate(flip: float) -> float:
        how = Augmentation((1.0, 1.0), (1.0, 1.0), flip)
        views = [
            training_view(image, pixels, how, view_generator(0, 0, 0, sample))
            for sample in range(2000)
        ]
        return float(np.mean([view[0, 0, 0].item() == 1.0 for view in views]))

    assert rate(0.5) == pytest.approx(0.5, abs=0.035)  # three standard deviations
    assert rate(0.2) == pytest.approx(0.2, abs=0.03)
    assert rate(0.0) == 0.0
    assert rate(1.0) == 1.0


def test_view_is_normalised_exactly_per_channel() -> None:
    image = Image.fromarray(np.array([[[0, 51, 255], [102, 204, 0]]] * 2, np.uint8))
    pixels = Preprocessing(2, 3, (0.5, 0.2, 0.0), (0.5, 0.1, 2.0))
    view = training_view(image, pixels, WHOLE, np.random.default_rng(0))
    assert view.dtype == np.float32
    assert view.shape == (3, 2, 2)
    assert view.flags.c_contiguous
    expected = [[[-1, -0.2]] * 2, [[0, 6]] * 2, [[0.5, 0]] * 2]
    np.testing.assert_allclose(view, expected, rtol=1.3e-6, atol=1e-5)
    plain = eval_view(image, Preprocessing(2, 3, (0.0,) * 3, (1.0,) * 3), "squash")
    assert plain[:, 0, 0].tolist() == pytest.approx([0, 0.2, 1])
    assert plain.max().item() == 1.0


def test_crop_is_independent_of_surrounding_pixels() -> None:
    values = np.full((40, 40), 255, np.uint8)
    values[10:30, 10:30] = 0
    how = Augmentation(scale=(0.25, 0.25), ratio=(1.0, 1.0), flip=0.0)

    class Central(np.random.Generator):
        def random(self) -> float:  # type: ignore[override]
            return 0.5

    rng = Central(np.random.PCG64(0))
    assert crop_box(40, 40, how, rng) == (10, 10, 30, 30)
    assert training_view(Image.fromarray(values), PLAIN_GREY, how, rng).max() == 0.0


def test_training_views_are_bilinear_for_every_backbone() -> None:
    image = Image.fromarray(noise(9, 9))
    expected = np.asarray(image.resize((4, 4), Image.Resampling.BILINEAR)) / np.float32(255)
    for interpolation in ("bicubic", "nearest"):
        pixels = Preprocessing(4, 1, (0.0,), (1.0,), interpolation)
        view = training_view(image, pixels, WHOLE, np.random.default_rng(0))
        np.testing.assert_allclose(view[0], expected, atol=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
@pytest.mark.parametrize("pixels", [PLAIN_GREY, PLAIN_RGB])
def test_every_mode_and_size_gives_a_finite_view(mode: str, pixels: Preprocessing) -> None:
    for size in ((1, 1), (3, 200), (28, 28)):
        image = Image.new(mode, size)
        rng = np.random.default_rng(0)
        for view in (
            training_view(image, pixels, Augmentation(), rng),
            eval_view(image, pixels, "crop"),
            eval_view(image, pixels, "squash"),
        ):
            assert view.shape == (pixels.channels, 4, 4)
            assert np.isfinite(view).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", (0.0, 1.0)),
        ("scale", (0.5, 0.4)),
        ("scale", (0.5, 1.5)),
        ("scale", (float("nan"), 1.0)),
        ("ratio", (0.0, 1.0)),
        ("ratio", (2.0, 1.0)),
        ("ratio", (1.0, float("inf"))),
        ("flip", -0.1),
        ("flip", 1.1),
    ],
)
def test_invalid_augmentation_is_rejected(field: str, value: object) -> None:
    with pytest.raises(BadOption, match=field):
        Augmentation(**{field: value})  # type: ignore[arg-type]


# --- whose randomness ---


def test_same_key_gives_the_same_view_in_any_order() -> None:
    image = photo(60, 50)
    pixels = Preprocessing(16)

    def view(sample: int) -> NDArray[np.float32]:
        return training_view(image, pixels, Augmentation(), view_generator(3, 1, 2, sample))

    forwards = [view(sample) for sample in range(20)]
    backwards = [view(sample) for sample in reversed(range(20))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards, strict=True))


def test_every_part_of_the_key_changes_the_view() -> None:
    keys = [(s, t, e, i) for s in range(4) for t in range(4) for e in range(4) for i in range(50)]
    firsts = np.array([view_generator(*key).random(3) for key in keys])
    assert len(np.unique(firsts[:, 0])) == len(keys)
    assert firsts.mean(axis=0) == pytest.approx([0.5] * 3, abs=0.02)
    assert np.abs(np.corrcoef(firsts[:-1, 0], firsts[1:, 0])[0, 1]) < 0.05  # nor are neighbours


def test_large_seeds_and_sample_numbers_have_independent_random_streams() -> None:
    keys = [(0, 0, 0, 0), (2**40, 0, 0, 0), (0, 0, 0, 2**40), (0, 0, 1, 0), (0, 1, 0, 0)]
    assert len({view_generator(*key).random() for key in keys}) == len(keys)


def test_view_generator_numbers_are_stable() -> None:
    """A resumed run sees the views it would have seen."""
    drawn = view_generator(1, 2, 3, 4).random(3)
    assert drawn.tolist() == [0.6646594969509324, 0.48206518490776007, 0.9935102247335821]


# --- test views ---


@pytest.mark.parametrize("size", [(90, 60), (60, 90), (300, 301), (64, 64), (20, 200), (500, 31)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_eval_view_is_the_centre_crop_of_the_resized_image(
    size: tuple[int, int], interpolation: str
) -> None:
    image = photo(*size)
    width, height = size
    shorter = 64  # round(56 * 256 / 224)
    full = (shorter, int(64 * height / width)) if width < height else (int(64 * width / height), 64)
    resized = image.resize(full, Image.Resampling[interpolation.upper()])
    left, top = round((full[0] - 56) / 2), round((full[1] - 56) / 2)
    expected = np.asarray(resized.crop((left, top, left + 56, top + 56))).astype(int)
    pixels = Preprocessing(56, 3, (0.0,) * 3, (1.0,) * 3, interpolation)
    view = eval_view(image, pixels).transpose(1, 2, 0) * 255
    assert np.abs(view - expected).max() <= 1.01  # rounding between Pillow's two passes


def test_eval_view_of_known_pixels() -> None:
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    image = Image.fromarray(values)
    seven = Preprocessing(
        7, 1, (0.0,), (1.0,), "bilinear"
    )  # 8 = round(7 * 256 / 224): nothing to resize
    view = eval_view(image, seven) * 255
    np.testing.assert_allclose(view[0], values[:7, :7], atol=1e-4)
    squashed = eval_view(image, Preprocessing(8, 1, (0.0,), (1.0,)), "squash") * 255
    np.testing.assert_allclose(squashed[0], values, atol=1e-4)


def test_squash_includes_the_edges_that_crop_removes() -> None:
    values = np.zeros((32, 96), np.uint8)
    values[:, :8] = values[:, -8:] = 255
    pixels = Preprocessing(32, 1, (0.0,), (1.0,), "bilinear")
    assert eval_view(Image.fromarray(values), pixels, "crop").max() == 0.0
    assert eval_view(Image.fromarray(values), pixels, "squash")[0, :, 0].min() == 1.0


def test_eval_view_uses_the_interpolation_of_the_preprocessing() -> None:
    image = Image.fromarray(noise(9, 9))
    for name in ("nearest", "bilinear", "bicubic", "lanczos"):
        expected = np.asarray(image.resize((6, 6), Image.Resampling[name.upper()]))
        view = eval_view(image, Preprocessing(6, 1, (0.0,), (1.0,), name), "squash")
        np.testing.assert_allclose(view[0] * 255, expected, atol=1e-4)


def test_very_long_image_needs_little_memory() -> None:
    view = eval_view(Image.new("L", (4_000_000, 1), 255), PLAIN_GREY)  # 5 x 20 million
    assert view.min() == 1.0


def test_unknown_interpolation_or_resize_suggests_the_nearest_name() -> None:
    image = Image.new("L", (4, 4))
    with pytest.raises(UnknownName, match="'bicubic'"):
        eval_view(image, Preprocessing(4, 1, (0.0,), (1.0,), "bicubik"))
    with pytest.raises(UnknownName, match="'squash'"):
        eval_view(image, PLAIN_GREY, "squosh")  # type: ignore[arg-type]


def test_large_jpeg_is_decoded_at_reduced_size(tmp_path: Path) -> None:
    """At a half, a quarter or an eighth, never below what is asked for, and it looks the same."""
    small = np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8)
    photograph = Image.fromarray(small).resize((2400, 1800), Image.Resampling.BICUBIC)
    photograph.save(tmp_path / "large.jpg", quality=95)
    photograph.save(tmp_path / "large.png")
    sizes = {
        min_side: open_image(tmp_path / "large.jpg", min_side).size
        for min_side in (100, 300, 512, 900, 901, 5000)
    }
    expected = [(300, 225), (600, 450), (1200, 900), (1200, 900), (2400, 1800), (2400, 1800)]
    assert list(sizes.values()) == expected
    assert open_image(tmp_path / "large.png", 100).size == (2400, 1800)
    assert required_min_side(PHOTOGRAPH) == 512
    assert augmented_min_side(PHOTOGRAPH, Augmentation()) == 792
    whole = eval_view(open_image(tmp_path / "large.jpg"), PHOTOGRAPH)
    reduced = eval_view(
        open_image(tmp_path / "large.jpg", required_min_side(PHOTOGRAPH)), PHOTOGRAPH
    )
    assert float(abs(whole - reduced).max()) < 0.05, "of a range of about 4"


def test_small_jpeg_is_decoded_at_full_size(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (375, 500, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "small.jpg")
    for least in (required_min_side(PHOTOGRAPH), augmented_min_side(PHOTOGRAPH, Augmentation())):
        found = open_image(tmp_path / "small.jpg", least)
        assert found.tobytes() == open_image(tmp_path / "small.jpg").tobytes()
