"""pure. Side stores: files by name, from which cookers read media.

A store is a folder of plain files, or a prepared WebDataset, whose files are named "KEY.PART".
"""

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

from megatron.blending.arguments import shown
from megatron.blending.energon._encoding.source_info import SourceInfo
from megatron.blending.formats.files import join_location, open_file
from megatron.blending.formats.prepared.nv_meta import CRUDE, SampleType, SplitPart, read_info
from megatron.blending.formats.prepared.webdataset import WebDataset

FILE_SYSTEM = "filesystem://"

Decode = Callable[[str, bytes], Any]


class FileStore:
    """Files by name. `store.get(name, sample)` returns the decoded content, and adds the file to
    the sample's `__sources__`.
    """

    def __init__(self, path: str, decode: Decode) -> None:
        self.path = path
        self._decode = decode

    def get_path(self) -> str:
        return self.path

    def get(self, key: str, sample: Any = None) -> Any:
        value, source = self[key]
        if sample is not None:
            is_dict = isinstance(sample, dict)
            sources = (
                sample.get("__sources__") if is_dict else getattr(sample, "__sources__", None)
            ) or ()
            if is_dict:
                sample["__sources__"] = (*sources, source)
            else:
                sample.__sources__ = (*sources, source)
        return value

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        content, source = self._read(key)
        return self._decode(os.path.basename(key).partition(".")[2], content), source

    def _read(self, key: str) -> tuple[bytes, SourceInfo]:
        raise NotImplementedError


class SystemFileStore(FileStore):
    """Files below a folder or URL. A name that leads out of it (`../x`) raises ValueError, since
    names come from records.
    """

    def _read(self, key: str) -> tuple[bytes, SourceInfo]:
        if os.path.isabs(key) or "://" in key or ".." in key.split("/"):
            raise ValueError(
                f"{self.path}: {shown(key)} is not a file below this folder; correct "
                "the record that "
                "names it"
            )
        file = open_file(join_location(self.path, key))
        return file.read(0, file.size), SourceInfo(self.path, key, "", (key,))


class WebdatasetFileStore(FileStore):
    """Files of a prepared WebDataset, in all of its splits, found by its index.sqlite."""

    @cached_property
    def dataset(self) -> WebDataset:
        """The data set, opened at first use. Each source has a store of its own files, which few
        cookers use.
        """
        parts = SampleType(module="megatron.energon", name=CRUDE, is_crude=True)
        return WebDataset(self.path, SplitPart(tuple(read_info(self.path).items()), ()), parts, {})

    def _read(self, key: str) -> tuple[bytes, SourceInfo]:
        # "a/b.seg.json" -> sample key "a/b", part "seg.json": the key ends at the first dot.
        folder, _, name = key.rpartition("/")
        base, _, part = name.partition(".")
        sample_key = f"{folder}/{base}" if folder else base
        index = self.dataset.find([sample_key]).get(sample_key)
        record = {} if index is None else self.dataset[index]
        if part not in record or record["__key__"] != sample_key:
            raise ValueError(
                f"{self.path}: has no file {shown(key)}; correct the record that names it"
            )
        return record[part], SourceInfo(self.path, sample_key, record["__shard__"], (key,))


def open_store(path: str, decode: Decode, where: str) -> FileStore:
    """Opens a store that `aux` of a metadataset names. Raises ValueError, starting with `where`, if
    it does not exist.
    """
    if path.startswith(FILE_SYSTEM):
        folder = path.removeprefix(FILE_SYSTEM)
        if not os.path.isdir(folder):
            raise ValueError(f"{where}: aux: {folder}: no such folder; check the path")
        return SystemFileStore(folder, decode)
    store = WebdatasetFileStore(path, decode)
    try:
        _ = store.dataset
    except ValueError as error:
        raise ValueError(f"{where}: aux: {error}") from None
    return store
