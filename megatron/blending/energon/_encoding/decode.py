"""pure. Decodes a part of a sample by the last suffix of its name:

    txt -> str, json -> its value, cls -> int, npy -> array, jpg -> image, mp4 -> video, ...

Any other part stays bytes. A library is imported when a part first needs it. No code in a file is
executed: pickles are refused unless they are allowed.
"""

import gzip
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from megatron.blending.arguments import check_one_of, shown
from megatron.blending.formats.decode import TEXT_PARTS, DecodeError, not_a

IMAGE_SUFFIXES = frozenset(
    "blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng "
    "jp2 j2k jpc jpf jpx j2c icns ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm "
    "pgm ppm pnm psd bw rgb rgba sgi ras tga icb vda vst webp wmf emf xbm xpm".split()
)
AV_SUFFIXES = frozenset("mp4 avi mov webm mkv flac mp3 wav flv".split())
_IMAGE_MODE = "torchrgb"
_AV_MODES = ("AVDecoder", "torch", "pyav")
_PICKLES = frozenset("pkl pickle pyd".split())


def keep_bytes(name: str, content: bytes) -> bytes:
    """Returns the bytes as they are: the decoder of a task encoder with `decoder = None`."""
    return content


@dataclass(frozen=True)
class SampleDecoder:
    """Function from the name and bytes of a part to its value:
    `SampleDecoder(image_decode="pilrgb")("jpg", content)`. It raises DecodeError if that fails.
    """

    image_decode: str = _IMAGE_MODE
    """One of IMAGE_MODES: "torchrgb" tensor (CHW) of floats in [0, 1], "rgb" array (HWC), "rgb8"
    bytes, "pilrgb" ...
    """
    av_decode: str = "AVDecoder"
    """"AVDecoder" returns an object that decodes on demand, "torch" all frames at once, "pyav" an
    open PyAV container.
    """
    video_decode_audio: bool = False
    """Decode the audio of a video, too (with "torch")."""
    allow_code: bool = False
    """Unpickle pickles, which runs code in them."""

    def __post_init__(self) -> None:
        if self.image_decode != _IMAGE_MODE:
            check_one_of("image_decode", self.image_decode, _media("images").IMAGE_MODES)
        check_one_of("av_decode", self.av_decode, _AV_MODES)

    def __call__(self, name: str, content: bytes) -> Any:
        suffix = name if name in _PLAIN else name.rpartition(".")[2]
        try:
            return self._decoded(suffix, name, content)
        except DecodeError:
            raise
        except ImportError as error:
            raise DecodeError(
                f"part {shown(name)}: needs {error.name}, which is not installed here: {error}"
            ) from error
        except Exception as error:  # libraries raise dozens of kinds for damaged bytes
            raise not_a(suffix, name, error) from error

    def _decoded(self, suffix: str, name: str, content: bytes) -> Any:
        plain = _PLAIN.get(suffix)
        if plain is not None:
            return plain(content)
        if suffix == "gz":
            return self(name.removesuffix("gz").removesuffix("."), gzip.decompress(content))
        if suffix in _PICKLES:
            if not self.allow_code:
                raise DecodeError(
                    f"part {shown(name)}: pickles run code; pass allow_code=True if you "
                    "trust the data"
                )
            return pickle.loads(content)
        if suffix.lower() in IMAGE_SUFFIXES:
            return _media("images").decode_image(content, self.image_decode)
        if suffix.lower() in AV_SUFFIXES:
            return self._open_av(content)
        return content

    def _open_av(self, content: bytes) -> object:
        if self.av_decode == "pyav":
            return import_module("av").open(io.BytesIO(content))
        decoder = _media("av").AVDecoder(io.BytesIO(content))
        return (
            decoder
            if self.av_decode == "AVDecoder"
            else decoder.get_frames(self.video_decode_audio)
        )


def _media(name: str) -> ModuleType:
    """Imports a module for media. A stream of text never does."""
    return import_module(f"megatron.blending.energon._media.{name}")


def _load_torch(content: bytes) -> object:
    return import_module("torch").load(io.BytesIO(content), weights_only=True)


def _load_npy(content: bytes) -> object:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _load_npz(content: bytes) -> object:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def _load_msgpack(content: bytes) -> object:
    return import_module("msgpack").unpackb(content)


def _load_cbor(content: bytes) -> object:
    return import_module("cbor2").loads(content)


_PLAIN: dict[str, Callable[[bytes], Any]] = {
    **TEXT_PARTS,
    **dict.fromkeys("cls cls2 index inx id".split(), int),
    **dict.fromkeys("mp msg".split(), _load_msgpack),
    "npy": _load_npy,
    "npz": _load_npz,
    "pth": _load_torch,
    "cbor": _load_cbor,
}

decode_part = SampleDecoder()
"""Decodes a part like energon's default decoder, except that it refuses pickles."""
