"""Archives and folders for tests, written by Python's own tarfile."""

import io
import json
import tarfile

from megatron.blending.energon._prepare import Preparation, prepare_webdataset


def write_tar(path, members, archive_format=tarfile.USTAR_FORMAT):
    """Write (name, content) pairs or mappings; a str for content is the type of a member that has
    none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=archive_format) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type = getattr(tarfile, content)
                archive.addfile(info)
    return path


def write_folder(folder, shards, **asked):
    """Write and prepare a folder of {shard: members}."""
    for name, members in shards.items():
        write_tar(folder / name, members)
    prepare_webdataset(str(folder), Preparation(**asked))
    return folder


def texts(*keys):
    """One sample for each key: its text, and a JSON object."""
    return {
        f"{key}.{part}": content
        for key in keys
        for part, content in (
            ("txt", f"text of {key}".encode()),
            ("json", json.dumps({"key": key}).encode()),
        )
    }
