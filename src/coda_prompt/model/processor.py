"""What this processor can compute in bfloat16."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys

import torch

_X86 = ("x86_64", "AMD64")


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for products in bfloat16."""
    if platform.machine() in _X86:  # where oneDNN also supports emulating them
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def disable_broken_amx() -> None:
    """Keep oneDNN from using AMX where it would end the process with an illegal instruction.

    Some virtual machines report AMX but no sizes of its tiles. oneDNN configures tiles of size zero
    there, and the first product in bfloat16 fails (https://github.com/uxlfoundation/oneDNN/issues/5689).
    This has to be called before the first operation of oneDNN, and respects `ONEDNN_MAX_CPU_ISA`.
    """
    reports_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)  # torch 2.6 or later
    if platform.machine() in _X86 and reports_amx() and not _tile_palettes():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # all before AMX


def _tile_palettes() -> int:
    """Return how many configurations of tiles an x86 processor reports; 0 if it cannot be read."""
    if sys.platform == "win32":
        return 0
    code = b"\x53"  # push rbx, which cpuid overwrites
    code += b"\xb8\x1d\x00\x00\x00\x31\xc9\x0f\xa2"  # mov eax, 0x1d; xor ecx, ecx; cpuid
    code += b"\x5b\xc3"  # pop rbx; ret, which returns eax
    try:
        memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a system that allows no generated code
        return 0
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32)(address)())
