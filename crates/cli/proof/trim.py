#!/usr/bin/env python3
"""Makes a library with CUDA kernels compress well, by removing the kernels that a program on one GPU does not use.

    python crates/cli/proof/trim.py libonnxruntime_providers_cuda.so 90

The kernels for GPUs of compute capability 9.0 stay, if their source file was compiled for the oldest GPU of the library as well. In
ONNX Runtime these are the plain operators; those for attention and for quantized products need newer GPUs, and take four fifths of
the bytes. The other source files get a small kernel for the oldest GPU. Therefore, the driver treats them as files that were not compiled
for this GPU, and only a program that starts one of their kernels gets an error. The library's size and its addresses stay the same;
the removed kernels are replaced by zeros.
"""

import struct
import sys

# The layout that CUDA's fatbinary_section.h defines and `cuobjdump --list-elf` shows. Each source file has one container.
CONTAINER = struct.Struct("<IHHQ")  # The fields are magic, version, size of this header, size of the entries.
# The fields are kind, version, the sizes of this header, of the kernels and of the compressed kernels, two words, architecture.
ENTRY = struct.Struct("<HHIQIIII")
MAGIC = struct.pack("<I", 0xBA55ED50)


def containers(data):
    """Returns the containers of a library: the start of each, and the architecture, start and size of its entries."""
    begin = data.find(MAGIC)
    while begin >= 0:
        _, version, header, size = CONTAINER.unpack_from(data, begin)
        end = begin + header + size
        if version != 1 or header != CONTAINER.size or end > len(data):
            # The magic number is part of the library's code here, and no container starts here.
            begin = data.find(MAGIC, begin + 4)
            continue
        entries, entry = [], begin + header
        while entry < end:
            _, _, header, size, _, _, _, architecture = ENTRY.unpack_from(data, entry)
            entries.append((architecture, entry, header + size))
            entry += header + size
        if entry != end:
            sys.exit(f"The container at {begin:#x} has another layout.")
        yield begin, entries
        begin = data.find(MAGIC, end)


def main():
    path, kept = sys.argv[1], int(sys.argv[2])
    with open(path, "rb") as file:
        data = bytearray(file.read())
    found = list(containers(data))
    oldest = min(architecture for _, entries in found for architecture, _, _ in entries)
    small = min((size, entry) for _, entries in found for architecture, entry, size in entries if architecture == oldest)
    small = data[small[1] : small[1] + small[0]]
    stayed = 0
    for begin, entries in found:
        by_architecture = {architecture: data[entry : entry + size] for architecture, entry, size in entries}
        stays = by_architecture.get(kept) if oldest in by_architecture else None
        stayed += bool(stays)
        space = sum(size for _, _, size in entries)
        if len(stays or small) > space:
            sys.exit(f"The container at {begin:#x} is smaller than the smallest kernel for {oldest}.")
        magic, version, header, _ = CONTAINER.unpack_from(data, begin)
        content = CONTAINER.pack(magic, version, header, len(stays or small)) + (stays or small)
        data[begin : begin + header + space] = content.ljust(header + space, b"\0")
    if not stayed:
        sys.exit(f"No source file of {path} was compiled for both {oldest} and {kept}.")
    with open(path, "r+b") as file:
        file.write(data)
    print(f"the kernels of {stayed} of {len(found)} source files stay")


if __name__ == "__main__":
    main()
