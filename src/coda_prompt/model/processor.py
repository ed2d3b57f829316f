"""What this processor computes in bfloat16, and how fast."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import sys
from typing import Literal

import torch

_X86 = ("x86_64", "AMD64")
_TILES = 0x1D
"""Leaf of the instruction cpuid: how many configurations AMX has."""


def multiplies_bfloat16() -> bool:
    """Return whether this processor is known to multiply bfloat16 faster than float32.

    AMX does, and so does AMD's AVX512_BF16. Intel's AVX512_BF16 alone does not: its products took
    1.6 times as long as those in float32 on a Xeon of 2023 (docs/lab/performance.md). Nor does ARM:
    packed weights get the slowest kernels there (https://github.com/pytorch/pytorch/issues/180447).
    """
    has_instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if platform.machine() not in _X86 or not has_instructions():
        return False
    return _reports_amx_tiles() or _is_amd()


def disable_broken_amx() -> None:
    """Keep oneDNN from using AMX where it would end the process with an illegal instruction.

    Some virtual machines report AMX but no sizes of its tiles. oneDNN configures tiles of size zero
    there, and the first product in bfloat16 fails (https://github.com/uxlfoundation/oneDNN/issues/5689).
    This has to be called before the first operation of oneDNN, and respects `ONEDNN_MAX_CPU_ISA`.
    """
    if platform.machine() in _X86 and _reports_amx() and not _reports_amx_tiles():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # all before AMX


def _reports_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)())  # torch 2.6 or later


def _reports_amx_tiles() -> bool:
    return _reports_amx() and _cpuid(_TILES, "eax") > 0


def _is_amd() -> bool:
    return _cpuid(0, "ebx") == int.from_bytes(b"Auth", "little")  # of AuthenticAMD


@functools.cache
def _cpuid(leaf: int, register: Literal["eax", "ebx"]) -> int:
    """Return what an x86 processor reports about itself; 0 if that cannot be read."""
    if sys.platform == "win32":
        return 0
    code = b"\x53\xb8" + leaf.to_bytes(4, "little")  # push rbx; mov eax, leaf
    code += b"\x31\xc9\x0f\xa2"  # xor ecx, ecx; cpuid
    if register == "ebx":
        code += b"\x89\xd8"  # mov eax, ebx
    code += b"\x5b\xc3"  # pop rbx; ret
    try:
        memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a system that allows no generated code
        return 0
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32)(address)())
