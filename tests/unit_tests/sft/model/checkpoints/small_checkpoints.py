"""Checkpoints of a few small files, with their checksums."""

from megatron.sft.model.checkpoints.checksums import file_names, sum_of, write_checksums
from megatron.sft.model.checkpoints.folder import checkpoint_path


def checkpoint(folder, iteration):
    """Write one of three files, and their checksums; return its path."""
    path = checkpoint_path(folder, iteration)
    (path / "huggingface").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "huggingface/config.json"):
        (path / name).write_bytes(name.encode() * 1000)
    write_checksums(path, {name: sum_of(path / name) for name in file_names(path)})
    return path


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
