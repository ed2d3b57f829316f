"""Virtual machines that report AMX but no tiles: products in bfloat16 must not end the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coda_prompt.model import processor

ISA = "ONEDNN_MAX_CPU_ISA"


@pytest.mark.parametrize(
    ("machine", "amx", "palettes", "limit"),
    [
        ("x86_64", True, 0, "AVX512_CORE_FP16"),
        ("x86_64", True, 1, None),
        ("x86_64", False, 0, None),
        ("aarch64", True, 0, None),
    ],
)
def test_amx_is_disabled_only_where_it_has_no_tiles(
    machine: str, amx: bool, palettes: int, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA, "")  # restored afterwards
    monkeypatch.delenv(ISA)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(processor, "_cpuid", lambda leaf, register: palettes)
    processor.disable_broken_amx()
    assert os.environ.get(ISA) == limit


def test_own_limit_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA, "AVX2")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(processor, "_cpuid", lambda leaf, register: 0)
    processor.disable_broken_amx()
    assert os.environ[ISA] == "AVX2"


@pytest.mark.parametrize(
    ("vendor", "instructions", "palettes", "faster"),
    [
        (b"GenuineIntel", True, 1, True),
        (b"GenuineIntel", True, 0, False),
        (b"GenuineIntel", False, 0, False),
        (b"AuthenticAMD", True, 0, True),
        (b"AuthenticAMD", False, 0, False),
        (bytes(4), True, 0, False),  # cpuid cannot be read
    ],
)
def test_where_bfloat16_is_faster(
    vendor: bytes,
    instructions: bool,
    palettes: int,
    faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cpuid(leaf: int, register: str) -> int:
        return int.from_bytes(vendor[:4], "little") if leaf == 0 else palettes

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(processor, "_cpuid", cpuid)
    assert processor.multiplies_bfloat16() == faster
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not processor.multiplies_bfloat16()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux lists what cpuid reports")
def test_cpuid_on_this_processor() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("cpuid is an instruction of x86")
    reported = Path("/proc/cpuinfo").read_text()
    assert processor._cpuid(0, "ebx").to_bytes(4, "little").decode() in reported
    assert processor._is_amd() == ("AuthenticAMD" in reported)


def test_products_in_bfloat16_on_this_processor() -> None:
    program = (
        "import coda_prompt.model.linear, torch\n"
        "matrix = torch.eye(64, dtype=torch.bfloat16)\n"
        "print((matrix @ matrix).sum().item())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != ISA}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "64.0\n"), run.stderr
